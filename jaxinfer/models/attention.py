"""Multi-head, grouped-query and multi-query self-attention; what it attends over is the caller's."""

from typing import Protocol, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.linear import Linear
from jaxinfer.models.rope import Rotation, rotate

Cache = TypeVar("Cache")


class AttentionFn(Protocol[Cache]):
    """Attention of a step's new tokens over a layer's cache: a pytree, so that it can cross a jit boundary.

    Takes ``q[T, N, H]``, ``k[T, K, H]``, ``v[T, K, H]`` (rotated) and the layer's cache; returns ``[T, N, H]`` and the
    cache with the new keys and values in it.
    """

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]: ...


class SelfAttention(nn.Module):
    """Fused qkv, rotary embedding, attention, output projection.

    The fused kernel is ``[K, G + 2, H, D]``: a KV head and the query heads it serves stay together, so a split over K
    shards queries, keys and values alike.
    """

    config: ModelConfig
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(
        self, x: jax.Array, angles: Rotation, attend: AttentionFn[Cache], cache: Cache
    ) -> tuple[jax.Array, Cache]:
        c = self.config
        heads, groups, width = c.num_key_value_heads, c.num_query_groups, c.head_dim
        qkv = Linear((heads, groups + 2, width), (c.hidden_size,), c.qkv_bias, self.param_dtype, name="qkv")(x)
        rotated = rotate(qkv[:, :, : groups + 1], angles)
        q = rotated[:, :, :groups].reshape(x.shape[0], heads * groups, width)
        out, cache = attend(q, rotated[:, :, groups], qkv[:, :, groups + 1], cache)
        out = out.reshape(x.shape[0], heads, groups, width)
        projection = Linear((c.hidden_size,), (heads, groups, width), c.o_bias, self.param_dtype, name="out")
        return projection(out), cache
