"""The paged KV pool on the device: one array a layer."""

import jax
import jax.numpy as jnp

from jaxinfer.models.config import ModelConfig


def init_kv_cache(config: ModelConfig, num_blocks: int, block_size: int, dtype: str) -> tuple[jax.Array, ...]:
    """An empty pool: per layer ``[P, 2K, S, H]``, keys of KV head h in row 2h and values in row 2h + 1.

    Page 0 is the sink that padding tokens write to. The pool is zeroed: masked attention multiplies what it reads too.
    """
    shape = (num_blocks, 2 * config.num_key_value_heads, block_size, config.head_dim)
    return tuple(jnp.zeros(shape, jnp.dtype(dtype)) for _ in range(config.num_hidden_layers))
