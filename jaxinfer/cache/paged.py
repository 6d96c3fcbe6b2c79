"""The paged KV pool on the device: one `LayerCache` a layer, in a float type or as codes with scales; and features."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jaxinfer.config import FeatureSpec
from jaxinfer.models.config import ModelConfig
from pallas_kernels.block_copy import block_copy
from pallas_kernels.kv_format import FORMATS, format_of


class LayerCache(NamedTuple):
    """One layer's part of the pool.

    Attributes:
        pages: [P, 2K, S, H], keys of KV head h in row 2h and values in row 2h + 1, in a float dtype or as codes (see
            `pallas_kernels.kv_format`); int4 codes share bytes, uint8[P, 2K, S, H / 2].
        scales: float32[P, 2K, S] of a pool of codes, ``value = code * scale``; None of a float pool.
    """

    pages: jax.Array
    scales: jax.Array | None = None

    @property
    def is_spread(self) -> bool:
        """Whether keys and values are stored with their channels spread (`jaxinfer.cache.spread`): those of int4."""
        kv_format = format_of(self.pages.dtype)
        return kv_format is not None and kv_format.packed


class KVCache(NamedTuple):
    """The pool: a pytree, donated from step to step. Page 0 is the sink that padding tokens write to.

    Attributes:
        layers: keys and values, one entry a layer, and behind them one for the layer of `FeatureSpec`.
        features: [P, 1, S, D] in the activations' dtype, what `FeatureSpec` says of the token in each slot; None where
            no method guesses from it.
    """

    layers: tuple[LayerCache, ...]
    features: jax.Array | None = None


def kv_cache_shapes(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: str, features: FeatureSpec | None = None
) -> KVCache:
    """The pool as `jax.ShapeDtypeStruct` leaves; allocates nothing.

    Args:
        config: the architecture.
        num_blocks: P, the padding block included.
        block_size: S.
        dtype: of keys and values, one of `jaxinfer.config.KV_CACHE_DTYPES`.
        features: what else is kept of each token; None for nothing.
    """
    return jax.eval_shape(lambda: _zeros(config, num_blocks, block_size, dtype, features))


def init_kv_cache(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: str,
    features: FeatureSpec | None = None,
    sharding: Sharding | None = None,
    whole: Sharding | None = None,
) -> KVCache:
    """An empty pool, zeroed: masked attention multiplies what it reads too.

    Args:
        config, num_blocks, block_size, dtype, features: as for `kv_cache_shapes`.
        sharding: of keys, values and their scales, which a mesh may have in parts; None is the default device.
        whole: of what is kept for guessing: features, and a head's layer.

    Raises:
        ValueError: the device has no room for it.
    """
    try:
        return _zeros(config, num_blocks, block_size, dtype, features, sharding, whole)
    except RuntimeError as error:  # jax.errors.JaxRuntimeError
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        num_bytes = kv_cache_bytes(kv_cache_shapes(config, num_blocks, block_size, dtype, features))
        raise ValueError(
            f"a KV cache of {num_blocks} blocks, {num_bytes / 2**30:.1f} GiB, does not fit into the "
            "device's memory; lower num_gpu_blocks_override, kv_cache_memory_bytes or gpu_memory_utilization"
        ) from error


def kv_cache_bytes(kv: KVCache) -> int:
    """Bytes of a pool, or of one of such shapes; scales and features included."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kv))


def copy_blocks(kv: KVCache, source_ids: jax.Array, target_ids: jax.Array) -> KVCache:
    """Copies blocks with their scales and features in every layer, in place when the pool is donated.

    Args:
        kv: the pool.
        source_ids, target_ids: int32[C]; no block twice among the targets, none both source and target. Pairs (0, 0)
            are padding and may repeat.
    """
    features = None if kv.features is None else block_copy(kv.features, source_ids, target_ids)
    return KVCache(tuple(_copied(layer, source_ids, target_ids) for layer in kv.layers), features)


def write_features(kv: KVCache, page_ids: jax.Array, offsets: jax.Array, values: jax.Array) -> KVCache:
    """Keeps what a step computed for its tokens, in place when the pool is donated; nothing where no features are kept.

    Args:
        kv: the pool.
        page_ids, offsets: int32[T], the slot of each token.
        values: [T, D].
    """
    if kv.features is None:
        return kv
    written = kv.features.at[page_ids, 0, offsets].set(values.astype(kv.features.dtype), mode="promise_in_bounds")
    return kv._replace(features=written)


def read_features(kv: KVCache, page_ids: jax.Array, offsets: jax.Array) -> jax.Array:
    """[B, D]: what is kept of the tokens in these slots.

    Args:
        kv: a pool with features.
        page_ids, offsets: int32[B].
    """
    assert kv.features is not None
    return kv.features.at[page_ids, 0, offsets].get(mode="promise_in_bounds")


def move_slots(kv: KVCache, slots: jax.Array) -> KVCache:
    """Moves what single tokens have in the pool, in everything that it holds; in place when it is donated.

    Args:
        kv: the pool; the slots of a block are axis 2 of every array.
        slots: int32[2, C], sources and targets, ``block * S + offset`` each. All sources are read before anything is
            written; no target twice, but for a slot that is moved to itself.
    """

    def moved(leaf: jax.Array) -> jax.Array:
        (source, target), (source_offset, target_offset) = slots // leaf.shape[2], slots % leaf.shape[2]
        return leaf.at[target, :, target_offset].set(leaf[source, :, source_offset])

    return jax.tree.map(moved, kv)


def _copied(layer: LayerCache, source_ids: jax.Array, target_ids: jax.Array) -> LayerCache:
    if layer.scales is None:
        return LayerCache(block_copy(layer.pages, source_ids, target_ids))
    return LayerCache(*block_copy(layer.pages, source_ids, target_ids, scales=layer.scales))


def _zeros(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: str,
    features: FeatureSpec | None = None,
    sharding: Sharding | None = None,
    whole: Sharding | None = None,
) -> KVCache:
    zeros = partial(jnp.zeros, device=sharding)
    rows = (num_blocks, 2 * config.num_key_value_heads, block_size)
    layers = tuple(_empty_layer(zeros, rows, config.head_dim, dtype) for _ in range(config.num_hidden_layers))
    if features is None:
        return KVCache(layers)
    everywhere = partial(jnp.zeros, device=whole)
    if features.layer is not None:
        own = features.layer
        rows = (num_blocks + features.spare_blocks, 2 * own.num_key_value_heads, block_size)
        layers += (_empty_layer(everywhere, rows, own.head_dim, dtype),)
    return KVCache(layers, everywhere((num_blocks, 1, block_size, features.width), jnp.dtype(features.dtype)))


def _empty_layer(zeros: Callable[..., jax.Array], rows: tuple[int, int, int], head_dim: int, dtype: str) -> LayerCache:
    kv_format = next((candidate for candidate in FORMATS if candidate.name == dtype), None)
    if kv_format is None:
        return LayerCache(zeros((*rows, head_dim), jnp.dtype(dtype)))
    width = head_dim // 2 if kv_format.packed else head_dim
    return LayerCache(zeros((*rows, width), kv_format.dtype), zeros(rows, jnp.float32))
