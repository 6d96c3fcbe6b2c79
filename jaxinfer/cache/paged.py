"""The paged KV pool on the device: one `LayerCache` a layer, in a float type or as codes with scales."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

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


KVCache = tuple[LayerCache, ...]
"""The pool: a pytree, donated from step to step. Page 0 is the sink that padding tokens write to."""


def kv_cache_shapes(config: ModelConfig, num_blocks: int, block_size: int, dtype: str) -> KVCache:
    """The pool as `jax.ShapeDtypeStruct` leaves; allocates nothing.

    Args:
        config: the architecture.
        num_blocks: P, the padding block included.
        block_size: S.
        dtype: one of `jaxinfer.config.KV_CACHE_DTYPES`.
    """
    return jax.eval_shape(lambda: _zeros(config, num_blocks, block_size, dtype))


def init_kv_cache(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: str, sharding: Sharding | None = None
) -> KVCache:
    """An empty pool, zeroed: masked attention multiplies what it reads too.

    Args:
        config, num_blocks, block_size, dtype: as for `kv_cache_shapes`.
        sharding: of every array; None is the default device.

    Raises:
        ValueError: the device has no room for it.
    """
    try:
        return _zeros(config, num_blocks, block_size, dtype, sharding)
    except RuntimeError as error:  # jax.errors.JaxRuntimeError
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        num_bytes = kv_cache_bytes(kv_cache_shapes(config, num_blocks, block_size, dtype))
        raise ValueError(
            f"a KV cache of {num_blocks} blocks, {num_bytes / 2**30:.1f} GiB, does not fit into the "
            "device's memory; lower num_gpu_blocks_override, kv_cache_memory_bytes or gpu_memory_utilization"
        ) from error


def kv_cache_bytes(kv: KVCache) -> int:
    """Bytes of a pool, or of one of such shapes; scales included."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kv))


def copy_blocks(kv: KVCache, source_ids: jax.Array, target_ids: jax.Array) -> KVCache:
    """Copies blocks with their scales in every layer, in place when the pool is donated.

    Args:
        kv: the pool.
        source_ids, target_ids: int32[C]; no block twice among the targets, none both source and target. Pairs (0, 0)
            are padding and may repeat.
    """
    return tuple(_copied(layer, source_ids, target_ids) for layer in kv)


def _copied(layer: LayerCache, source_ids: jax.Array, target_ids: jax.Array) -> LayerCache:
    if layer.scales is None:
        return LayerCache(block_copy(layer.pages, source_ids, target_ids))
    return LayerCache(*block_copy(layer.pages, source_ids, target_ids, scales=layer.scales))


def _zeros(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: str, sharding: Sharding | None = None
) -> KVCache:
    zeros = partial(jnp.zeros, device=sharding)
    rows = (num_blocks, 2 * config.num_key_value_heads, block_size)
    kv_format = next((candidate for candidate in FORMATS if candidate.name == dtype), None)
    if kv_format is None:
        return tuple(
            LayerCache(zeros((*rows, config.head_dim), jnp.dtype(dtype))) for _ in range(config.num_hidden_layers)
        )
    width = config.head_dim // 2 if kv_format.packed else config.head_dim
    return tuple(
        LayerCache(zeros((*rows, width), kv_format.dtype), zeros(rows, jnp.float32))
        for _ in range(config.num_hidden_layers)
    )
