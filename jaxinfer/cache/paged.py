"""The paged KV pool on the device: one array a layer."""

import math

import jax
import jax.numpy as jnp

from jaxinfer.models.config import ModelConfig


def init_kv_cache(config: ModelConfig, num_blocks: int, block_size: int, dtype: str) -> tuple[jax.Array, ...]:
    """An empty pool: per layer ``[P, 2K, S, H]``, keys of KV head h in row 2h and values in row 2h + 1.

    Page 0 is the sink that padding tokens write to. The pool is zeroed: masked attention multiplies what it reads too.

    Raises:
        ValueError: the device has no room for it.
    """
    shape = (num_blocks, 2 * config.num_key_value_heads, block_size, config.head_dim)
    try:
        return tuple(jnp.zeros(shape, jnp.dtype(dtype)) for _ in range(config.num_hidden_layers))
    except RuntimeError as error:  # jax.errors.JaxRuntimeError
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        num_bytes = config.num_hidden_layers * math.prod(shape) * jnp.dtype(dtype).itemsize
        raise ValueError(
            f"a KV cache of {num_blocks} blocks, {num_bytes / 2**30:.1f} GiB, does not fit into the device's memory; "
            "lower num_gpu_blocks_override, kv_cache_memory_bytes or gpu_memory_utilization"
        ) from error
