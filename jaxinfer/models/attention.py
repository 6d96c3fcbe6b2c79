"""Multi-head, grouped-query and multi-query self-attention; what it attends over is the caller's."""

from typing import NamedTuple, Protocol, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.fused_product import normed_product
from jaxinfer.models.linear import Linear
from jaxinfer.models.norm import Norm
from jaxinfer.models.rope import Rotation, rotate

Cache = TypeVar("Cache")


class Sight(NamedTuple):
    """What a layer's tokens see and how they weigh it, fixed when tracing.

    Attributes:
        window: positions that a token sees, its own included; None for all before it.
        scale: factor on the logits; None for ``H ** -0.5``.
        softcap: ``cap * tanh(logits / cap)`` after scaling; None for none.
    """

    window: int | None = None
    scale: float | None = None
    softcap: float | None = None


class AttentionFn(Protocol[Cache]):
    """Attention of a step's new tokens over a layer's cache: a pytree, so that it can cross a jit boundary.

    Takes ``qkv[T, K, G + 2, H]`` as the projection leaves it (of each KV head its G queries, its key and its value, not
    rotated yet, so that one kernel can rotate and write), the tokens' angles, the layer's cache and its `Sight`;
    returns ``[T, N, H]`` and the cache with the new keys and values in it.
    """

    def __call__(self, qkv: jax.Array, angles: Rotation, cache: Cache, sight: Sight) -> tuple[jax.Array, Cache]: ...


def split_rotated(qkv: jax.Array, angles: Rotation) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``q[T, N, H]`` and ``k[T, K, H]``, rotated, and ``v[T, K, H]`` of ``qkv[T, K, G + 2, H]``."""
    tokens, heads, rows, width = qkv.shape
    rotated = rotate(qkv[:, :, : rows - 1], angles)
    q = rotated[:, :, : rows - 2].reshape(tokens, heads * (rows - 2), width)
    return q, rotated[:, :, rows - 2], qkv[:, :, rows - 1]


class SelfAttention(nn.Module):
    """Fused qkv, norm of queries and keys, rotary embedding, attention, output projection.

    The fused kernel is ``[K, G + 2, H, D]``: a KV head and the query heads it serves stay together, so a split over K
    shards queries, keys and values alike. `sum_over`: see `Linear`; K is split over that axis. `window`: of this layer.
    `in_size`: width of what it is given, where that is not the model's.
    """

    config: ModelConfig
    param_dtype: jnp.dtype = jnp.float32
    sum_over: str | None = None
    window: int | None = None
    in_size: int = 0

    @nn.compact
    def __call__(
        self, x: jax.Array, angles: Rotation, attend: AttentionFn[Cache], cache: Cache, norm: Norm | None = None
    ) -> tuple[jax.Array, Cache]:
        """`norm`: of x, which comes first."""
        c = self.config
        heads, groups, width = c.num_key_value_heads, c.num_query_groups, c.head_dim
        size = self.in_size or c.hidden_size
        linear = Linear((heads, groups + 2, width), (size,), c.qkv_bias, self.param_dtype, name="qkv")
        fused = None
        if norm is not None and not c.qkv_bias and not self.is_initializing():
            fused = normed_product(x, norm, linear.variables["params"]["kernel"])
        if fused is None:
            qkv = linear(x if norm is None else norm(x))
        else:
            qkv = fused.reshape(x.shape[0], heads, groups + 2, width)
        if c.qk_norm is not None:
            q, k = self._norm("q_norm", qkv[:, :, :-2]), self._norm("k_norm", qkv[:, :, -2])
            qkv = jnp.concatenate([q, k[:, :, None], qkv[:, :, -1:]], axis=2)
        out, cache = attend(qkv, angles, cache, Sight(self.window, c.query_scale, c.attn_softcap))
        out = out.reshape(x.shape[0], heads, groups, width)
        sizes = (c.hidden_size,), (heads, groups, width)
        return Linear(*sizes, c.o_bias, self.param_dtype, self.sum_over, name="out")(out), cache

    def _norm(self, name: str, x: jax.Array) -> jax.Array:
        c, full = self.config, self.config.qk_norm == "full"
        shape = x.shape[-1:] if c.qk_norm == "head" else x.shape[1:]
        over = len(shape) if full else 1
        return Norm(c, shape, over, False, self.param_dtype, self.sum_over if full else None, name=name)(x)
