"""The step program of a model that need not exist, compiled for a GPU that is not here."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.cache.paged import KVCache, kv_cache_shapes
from jaxinfer.config import FeatureSpec
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes
from jaxinfer.planning.deviceless import DevicelessReport, GPUTarget, compile_for, compiling_for
from jaxinfer.planning.xla_dump import Launch
from jaxinfer.quant.plan import QuantPlan
from jaxinfer.runner.eagle_step import EagleHead, EagleStep
from jaxinfer.runner.inputs import StepSpec, packed_size
from jaxinfer.runner.programs import gpu_options, pool_specs
from jaxinfer.runner.step import StepOutput, make_forward_step
from jaxinfer.sampling.state import SamplingState, init_state
from jaxinfer.sharding.placement import WHOLE, Placement
from jaxinfer.sharding.shards import Shards, shards_of

_FIRST_OF_A_LAYER = "rope_kv_write"


@dataclass(frozen=True)
class DevicelessStep:
    """A compiled step and what it was compiled from.

    Attributes:
        report: what the compiler decided; bytes are for each device.
        shards: how the model lies on the devices.
        params, kv, state: shapes of the arguments, of all devices together.
    """

    report: DevicelessReport
    shards: Shards
    params: Any
    kv: KVCache
    state: SamplingState

    @property
    def donated_bytes(self) -> int:
        """What one device must update in place: its part of the pool, and the sampling state."""
        layers, features = _num_bytes(self.kv.layers), _num_bytes(self.kv.features)
        return layers // self.shards.split.num_parts + features + _num_bytes(self.state)

    @property
    def param_bytes(self) -> int:
        """Parameters of one device."""
        return _num_bytes(self.shards.part_shapes(self.params))

    def layers(self) -> tuple[tuple[Launch, ...], ...]:
        """Launches from each layer's KV write to the next one's, so the last of a layer comes with the one before."""
        launches = self.report.launches
        starts = [index for index, launch in enumerate(launches) if launch.name.startswith(_FIRST_OF_A_LAYER)]
        return tuple(launches[start:end] for start, end in pairwise(starts))


def compile_step(
    target: GPUTarget,
    config: ModelConfig,
    spec: StepSpec,
    *,
    num_pages: int = 4096,
    block_size: int = 16,
    dtype: Any = jnp.bfloat16,
    kv_dtype: str = "auto",
    plan: QuantPlan | None = None,
    features: FeatureSpec | None = None,
    eagle: EagleHead | None = None,
    splits_experts: bool = False,
) -> DevicelessStep:
    """Compiles the step the engine would run, split over the devices of `target`; nothing is allocated.

    Args:
        target: from `gpu_target`.
        config: the architecture.
        spec: the step's shape.
        num_pages: P, of each layer's pool.
        block_size: S.
        dtype: of parameters and activations.
        kv_dtype: of the pool, one of `jaxinfer.config.KV_CACHE_DTYPES`; "auto" is `dtype`.
        plan: which parameters are quantised, and how; None for none.
        features: what the pool keeps of each token beside keys and values, on every device; None for nothing.
        eagle: a head whose layer the step keeps up, with shapes of its parameters; `features` are what it is given. For
            one device.
        splits_experts: see `ModelSplit`.

    Raises:
        ValueError: the model cannot be split over so many devices.
    """
    count = target.mesh.size
    placement = Placement(mesh=target.mesh, axis=target.mesh.axis_names[0]) if count > 1 else Placement()
    shapes = param_shapes(config, dtype, plan)
    shards = shards_of(config, placement, shapes, splits_experts=splits_experts)
    params = shards.arranged(shapes)
    kv_dtype = jnp.dtype(dtype).name if kv_dtype == "auto" else kv_dtype
    kv = kv_cache_shapes(shards.split.padded, num_pages, block_size, kv_dtype, features)
    state = jax.eval_shape(lambda: init_state(spec.num_rows, config.vocab_size))
    packed = jax.ShapeDtypeStruct((packed_size(spec),), jnp.int32)
    specs, pool = tuple(jax.tree.leaves(shards.tree_specs(params))), pool_specs(shards, kv)
    step = make_forward_step(
        config,
        jax.tree.structure(shards.part_shapes(params)),
        spec,
        block_size=block_size,
        num_logprobs=5,
        shards=shards,
        eagle=None if eagle is None else EagleStep(eagle.model, jax.tree.structure(eagle.params), block_size),
    )
    extras = () if eagle is None else (None, tuple(jax.tree.leaves(eagle.params)))
    outputs: Any = StepOutput(WHOLE, WHOLE, pool, WHOLE)  # type: ignore[arg-type]
    step = placement.program(step, (specs, pool, WHOLE, WHOLE, *jax.tree.map(lambda _: WHOLE, extras)), outputs)
    leaves = tuple(map(placement.shape, jax.tree.leaves(params), specs))
    arguments = (leaves, jax.tree.map(placement.shape, kv, pool), state, packed, *extras)
    with compiling_for(target):
        options = gpu_options(params)
    report = compile_for(target, jax.jit(step, donate_argnums=(1, 2)), *arguments, compiler_options=options)
    return DevicelessStep(report, shards, params, kv, state)


def _num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
