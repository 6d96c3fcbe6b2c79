"""The step program of a model that need not exist, compiled for a GPU that is not here."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.cache.paged import KVCache, kv_cache_shapes
from jaxinfer.config import FeatureSpec
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes
from jaxinfer.planning.deviceless import DevicelessReport, GPUTarget, compile_for, compiling_for
from jaxinfer.planning.xla_dump import Launch
from jaxinfer.quant.plan import QuantPlan
from jaxinfer.runner.eagle_step import EagleHead, EagleStep
from jaxinfer.runner.inputs import StepSpec, packed_size
from jaxinfer.runner.programs import gpu_options
from jaxinfer.runner.step import StepOutput, make_forward_step
from jaxinfer.sampling.state import SamplingState, init_state

AXIS = "model"
_FIRST_OF_A_LAYER = "rope_kv_write"

# Which axis of a layer's parameter is split over the devices; what is not named here lies whole on each of them.
_SPLIT_AXES = {
    "attn/qkv/kernel": 0,
    "attn/qkv/bias": 0,
    "attn/out/kernel": 1,
    "mlp/gate_up/kernel": 1,
    "mlp/gate_up/bias": 1,
    "mlp/down/kernel": 1,
}


@dataclass(frozen=True)
class DevicelessStep:
    """A compiled step and what it was compiled from.

    Attributes:
        report: what the compiler decided; bytes are for each device.
        params, kv, state: shapes of the arguments, of all devices together.
        num_devices: that the layers are split over.
    """

    report: DevicelessReport
    params: Any
    kv: KVCache
    state: SamplingState
    num_devices: int

    @property
    def donated_bytes(self) -> int:
        """What one device must update in place: its part of the pool, and the sampling state."""
        layers, features = _num_bytes(self.kv.layers), _num_bytes(self.kv.features)
        return layers // self.num_devices + features + _num_bytes(self.state)

    @property
    def param_bytes(self) -> int:
        """Parameters of one device."""
        return sum(
            _num_bytes(leaf) // (1 if _split_axis(path) is None else self.num_devices)
            for path, leaf in jax.tree_util.tree_leaves_with_path(self.params)
        )

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
) -> DevicelessStep:
    """Compiles the step the engine would run, its layers split over the devices of `target` by KV head and by
    feed-forward channel; nothing is allocated.

    Args:
        target: from `gpu_target`.
        config: the architecture.
        spec: the step's shape.
        num_pages: P, of each layer's pool.
        block_size: S.
        dtype: of parameters and activations.
        kv_dtype: of the pool, one of `jaxinfer.config.KV_CACHE_DTYPES`; "auto" is `dtype`.
        plan: which parameters are quantised, and how; None for none. For one device.
        features: what the pool keeps of each token beside keys and values, on every device; None for nothing.
        eagle: a head whose layer the step keeps up, with shapes of its parameters; `features` are what it is given. For
            one device.

    Raises:
        ValueError: the model cannot be split over so many devices.
    """
    count = target.mesh.size
    if plan is not None and count > 1:
        raise ValueError(f"quantised parameters are not split over {count} devices yet; compile for one")
    params = param_shapes(config, dtype, plan)
    kv_dtype = jnp.dtype(dtype).name if kv_dtype == "auto" else kv_dtype
    kv = kv_cache_shapes(config, num_pages, block_size, kv_dtype, features)
    state = jax.eval_shape(lambda: init_state(spec.num_rows, config.vocab_size))
    packed = jax.ShapeDtypeStruct((packed_size(spec),), jnp.int32)
    leaves, tree = jax.tree.flatten(params)
    step = make_forward_step(
        _part_of(config, count),
        tree,
        spec,
        block_size=block_size,
        num_logprobs=5,
        sum_over=AXIS if count > 1 else None,
        eagle=None if eagle is None else EagleStep(eagle.model, jax.tree.structure(eagle.params), block_size),
    )
    arguments: tuple[Any, ...] = (tuple(leaves), kv, state, packed)
    if eagle is not None:
        arguments += (None, tuple(jax.tree.leaves(eagle.params)))
    if count > 1:
        whole = PartitionSpec()
        pool = jax.tree_util.tree_map_with_path(_pool_spec, kv)
        specs = (_param_specs(params), pool, whole, whole)
        outputs = StepOutput(whole, whole, pool, whole)  # type: ignore[arg-type]
        step = jax.shard_map(step, mesh=target.mesh, in_specs=specs, out_specs=outputs, check_vma=False)
        arguments = (_placed(target, arguments[0], specs[0]), _pool_placed(target, kv, pool), state, packed)
    with compiling_for(target):
        options = gpu_options(params)
    report = compile_for(target, jax.jit(step, donate_argnums=(1, 2)), *arguments, compiler_options=options)
    return DevicelessStep(report, params, kv, state, count)


def _part_of(config: ModelConfig, count: int) -> ModelConfig:
    """What one of `count` devices has of a model."""
    if count > 1 and (config.num_experts or config.qk_norm in ("heads", "full")):
        raise ValueError(
            f"num_experts={config.num_experts}, qk_norm={config.qk_norm!r}: how experts, and norms over more than one "
            "head, lie on several devices is not built yet; compile for one"
        )
    sizes = {
        name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    }
    for name, size in sizes.items():
        if size % count:
            raise ValueError(f"{name}={size} cannot be split over {count} devices; use a divisor of it")
    return replace(config, head_dim=config.head_dim, **{name: size // count for name, size in sizes.items()})


def _split_axis(path: tuple[Any, ...]) -> int | None:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return next((axis for ending, axis in _SPLIT_AXES.items() if name.endswith(ending)), None)


def _param_specs(params: Any) -> tuple[PartitionSpec, ...]:
    """How each leaf is split, in the order of the flattened tree."""
    axes = (_split_axis(path) for path, _ in jax.tree_util.tree_leaves_with_path(params))
    return tuple(PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS) for axis in axes)


def _placed(target: GPUTarget, shapes: Any, specs: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(
        jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(target.mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    )


def _pool_spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
    """Keys and values are split by KV head; features lie whole on every device."""
    del leaf
    in_a_layer = path[0] == jax.tree_util.GetAttrKey("layers")
    return PartitionSpec(None, AXIS) if in_a_layer else PartitionSpec()


def _pool_placed(target: GPUTarget, kv: KVCache, specs: KVCache) -> KVCache:
    def placed(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(target.mesh, spec))

    return jax.tree.map(placed, kv, specs)


def _num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
