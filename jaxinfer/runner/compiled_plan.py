"""A memory plan whose numbers come from XLA: the engine's step programs, compiled for a GPU that is not here."""

from dataclasses import dataclass

from jaxinfer.planning.deviceless import gpu_target
from jaxinfer.planning.memory_plan import MemoryPlan
from jaxinfer.planning.step_memory import LOGITS_IN_FLIGHT
from jaxinfer.runner.deviceless_step import DevicelessStep, compile_step
from jaxinfer.runner.inputs import StepSpec, packed_size
from jaxinfer.sampling.state import state_bytes

_UNQUANTISED = ("fp16", "bf16")


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
        plan: weights in 16 bits.
        gpu: name in `jaxinfer.planning.gpu_specs.GPU_SPECS`.

    Raises:
        ValueError: the engine has no such weights, or the model cannot be split so.
        RuntimeError: the CUDA plugin is missing; says what to install.
    """
    setting = plan.setting
    if setting.quant not in _UNQUANTISED:
        raise ValueError(
            f"quant={setting.quant!r} cannot be compiled: plans of quantised weights are not compiled yet; ask for "
            "quant='fp16', on more or larger GPUs if need be"
        )
    rows, width = setting.max_seqs, -(-setting.context // setting.block_size)
    largest = StepSpec(max(setting.max_num_batched_tokens, rows), rows, width, sampler=True)
    target = gpu_target(gpu, setting.tp)

    def compiled(spec: StepSpec) -> DevicelessStep:
        return compile_step(
            target,
            setting.model,
            spec,
            num_pages=plan.num_blocks,
            block_size=setting.block_size,
            kv_dtype=setting.kv_dtype,
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
