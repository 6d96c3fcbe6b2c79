"""Joins forward and backward passes into one differentiable function; vmap folds its axis into the batch."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from pallas_kernels.dispatch import current_device
from pallas_kernels.flash_attention.config import TileSet, tile_set
from pallas_kernels.flash_attention.spec import AttentionSpec, Masks
from pallas_kernels.flash_attention.triton import flash_attention_triton
from pallas_kernels.flash_attention.triton_backward import key_value_gradients_triton, query_gradient_triton
from pallas_kernels.flash_attention.xla import flash_attention_xla, flash_attention_xla_backward


class Passes(NamedTuple):
    """An implementation, static in a trace.

    Attributes:
        name: "triton", "triton-interpret" or "xla".
        spec: what to compute.
        tiles: of the Triton kernels; None for "xla".
    """

    name: str
    spec: AttentionSpec
    tiles: TileSet | None

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array, masks: Masks, *, with_lse: bool) -> Any:
        """``(out, lse or None)``."""
        if self.tiles is None:
            out, lse = flash_attention_xla(q, k, v, masks, self.spec)
            return out, lse if with_lse else None
        tiles = self.tiles.forward.fitted(q.shape[1], k.shape[1])
        interpret = self.name == "triton-interpret"
        return flash_attention_triton(q, k, v, masks, self.spec, with_lse=with_lse, tiles=tiles, interpret=interpret)

    def backward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        masks: Masks,
        lse: jax.Array,
        delta: jax.Array,
        grad: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """``(dq, dk, dv)``."""
        operands = (q, k, v, masks, lse, delta, grad, self.spec)
        if self.tiles is None:
            return flash_attention_xla_backward(*operands)
        interpret = self.name == "triton-interpret"
        dq_tiles = self.tiles.dq.fitted(q.shape[1], k.shape[1])
        dkv_tiles = self.tiles.dkv.fitted(q.shape[1], k.shape[1])
        dq = query_gradient_triton(*operands, tiles=dq_tiles, interpret=interpret)
        return dq, *key_value_gradients_triton(*operands, tiles=dkv_tiles, interpret=interpret)


def attend(
    name: str, spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, masks: Masks, *, with_lse: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Runs an implementation so that `jax.grad` and `jax.vmap` work on it.

    Raises:
        NotImplementedError: what the kernel cannot do.
    """
    tiles = None if name == "xla" else tile_set(current_device(), q.dtype, q.shape[-1])
    passes = Passes(name, spec, tiles)
    return _attend(passes, with_lse, q, k, v, masks)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(passes: Passes, with_lse: bool, q: jax.Array, k: jax.Array, v: jax.Array, masks: Masks) -> Any:
    return _batched(partial(passes.forward, with_lse=with_lse))(q, k, v, masks)


def _attend_forward(
    passes: Passes, with_lse: bool, q: jax.Array, k: jax.Array, v: jax.Array, masks: Masks
) -> tuple[Any, Any]:
    out, lse = _batched(partial(passes.forward, with_lse=True))(q, k, v, masks)
    return (out, lse if with_lse else None), (q, k, v, masks, out, lse)


def _attend_backward(passes: Passes, with_lse: bool, residuals: Any, grads: Any) -> tuple[Any, ...]:
    q, k, v, masks, out, lse = residuals
    grad, lse_grad = grads
    # The gradient of a logit is weight * (grad . v - delta); the log-sum-exp adds weight * lse_grad to it.
    delta = jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), axis=-1).transpose(0, 2, 1)
    if with_lse:
        delta = delta - lse_grad
    # A query that sees nothing has no logits, whatever the gradient of its -inf is.
    delta = jnp.where(lse == -jnp.inf, 0.0, delta)
    dq, dk, dv = _batched(passes.backward)(q, k, v, masks, lse, delta, grad)
    return dq, dk, dv, None


_attend.defvjp(_attend_forward, _attend_backward)


def _batched(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose operands and results all start with the batch, with a rule for vmap: that axis joins the batch.

    A kernel's grid has no room for axes of vmap's making, and a loop whose trip count is batched computes too much.
    """

    @custom_vmap
    def call(*operands: Any) -> Any:
        return function(*operands)

    @call.def_vmap
    def fold(axis_size: int, in_batched: Any, *operands: Any) -> tuple[Any, Any]:
        def folded(array: jax.Array, batched: bool) -> jax.Array:
            if not batched:
                array = jnp.broadcast_to(array, (axis_size, *array.shape))
            return array.reshape(-1, *array.shape[2:])

        results = call(*jax.tree.map(folded, tuple(operands), tuple(in_batched)))
        results = jax.tree.map(lambda array: array.reshape(axis_size, -1, *array.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return call
