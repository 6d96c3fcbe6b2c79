"""A memory plan whose numbers come from XLA: the engine's step programs, compiled for a GPU that is not here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes
from jaxinfer.planning.deviceless import gpu_target
from jaxinfer.planning.memory_plan import MemoryPlan
from jaxinfer.planning.step_memory import LOGITS_IN_FLIGHT
from jaxinfer.quant.plan import DOWN_GROUP, QuantPlan, input_axis, path_name
from jaxinfer.quant.storage import CheckpointMethod, Method, Storage, fitting
from jaxinfer.runner.deviceless_step import DevicelessStep, compile_step
from jaxinfer.runner.inputs import StepSpec, packed_size
from jaxinfer.sampling.state import state_bytes

_UNQUANTISED = ("fp16", "bf16")
_METHODS: Mapping[str, Method] = {name: name for name in ("int8", "int8_w8a8", "fp8", "int4", "nf4", "fp4")}
_OF_CHECKPOINTS: Mapping[CheckpointMethod, Storage] = {
    "awq": Storage("int4", 128, symmetric=False, scales="float16", offsets="float32"),
    "gptq": Storage("int4", 128, scales="float16", offsets="float16"),
}
"""As the common checkpoints have it, GPTQ's with zero points in the middle."""


@dataclass(frozen=True)
class CompiledPlan:
    """What XLA makes of a plan. Bytes are those of each GPU.

    Attributes:
        weights, kv_cache: arguments of the programs.
        sampling: the sampler's state, and the logits of the steps in flight.
        scratch: temporaries of the largest step at their peak, and what the host sends.
        launches: of a decode step of all requests that draws greedily.
        launches_a_layer: of these, those of one layer; 0 where that cannot be told.
        command_buffers: CUDA graphs of that step.
        launches_outside_graphs: launches that the host issues one by one.
        compile_seconds: of both programs.
    """

    weights: int
    kv_cache: int
    sampling: int
    scratch: int
    launches: int
    launches_a_layer: int
    command_buffers: int
    launches_outside_graphs: int
    compile_seconds: float

    @property
    def total(self) -> int:
        """All that is used of each GPU."""
        return self.weights + self.kv_cache + self.sampling + self.scratch


def compile_plan(plan: MemoryPlan, gpu: str) -> CompiledPlan:
    """Compiles the largest step, which draws with the full sampler, and a greedy decode step; allocates nothing.

    Args:
        plan: weights in 16 bits, or quantised.
        gpu: name in `jaxinfer.planning.gpu_specs.GPU_SPECS`.

    Raises:
        ValueError: the engine has no such weights, or the model cannot be split so.
        RuntimeError: the CUDA plugin is missing; says what to install.
    """
    setting = plan.setting
    rows, width = setting.max_seqs, -(-setting.context // setting.block_size)
    largest = StepSpec(max(setting.max_num_batched_tokens, rows), rows, width, sampler=True)
    quant_plan = plan_of_format(setting.quant, setting.model)
    target = gpu_target(gpu, setting.tp)

    def compiled(spec: StepSpec) -> DevicelessStep:
        return compile_step(
            target,
            setting.model,
            spec,
            num_pages=plan.num_blocks,
            block_size=setting.block_size,
            kv_dtype=setting.kv_dtype,
            plan=quant_plan,
        )

    whole, decode = compiled(largest), compiled(StepSpec(rows, rows, width, sampler=False))
    state, inputs = state_bytes(rows, setting.model.vocab_size), 4 * packed_size(largest)
    memory = whole.report
    return CompiledPlan(
        weights=memory.argument_bytes - memory.alias_bytes - inputs,
        kv_cache=memory.alias_bytes - state,
        sampling=state + LOGITS_IN_FLIGHT * (memory.output_bytes - memory.alias_bytes),
        scratch=memory.temp_bytes + inputs,
        launches=len(decode.report.launches),
        launches_a_layer=len(decode.layers()[-1]) if decode.layers() else 0,
        command_buffers=decode.report.num_command_buffers,
        launches_outside_graphs=len(decode.report.launches_outside_graphs()),
        compile_seconds=memory.compile_seconds + decode.report.compile_seconds,
    )


def plan_of_format(name: str, model: ModelConfig) -> QuantPlan | None:
    """How a model's parameters are stored in a format of `jaxinfer.planning.formulas.WEIGHT_FORMATS`; None for 16 bits.

    Raises:
        ValueError: the engine has no such weights on a GPU.
    """
    if name in _UNQUANTISED:
        return None
    if name in _METHODS:
        return QuantPlan(_METHODS[name], down_group=DOWN_GROUP)
    for method, storage in _OF_CHECKPOINTS.items():
        if name == method:
            leaves = jax.tree_util.tree_leaves_with_path(param_shapes(model, "bfloat16"))
            shapes = {path_name(path): leaf.shape for path, leaf in leaves}
            axes = {path: input_axis(path, shape) for path, shape in shapes.items() if path.startswith("layers_")}
            kept = {
                path: fitting(storage, math.prod(shapes[path][axis:]), shapes[path][-1])
                for path, axis in axes.items()
                if axis is not None
            }
            return QuantPlan(method, kept=kept, only_kept=True)
    names = ", ".join((*_UNQUANTISED, *_METHODS, *_OF_CHECKPOINTS))
    raise ValueError(f"quant={name!r} cannot be compiled; use one of {names}")
