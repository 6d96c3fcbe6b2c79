"""Linear projections with every weight stored ``[out, in]``."""

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.quant import matmul
from jaxinfer.quant.array import QuantArray

FEW_TOKENS = 256
"""Up to so many tokens the CPU takes the weights as the left operand."""


def parameter(
    module: nn.Module, name: str, init: nn.initializers.Initializer, shape: tuple[int, ...], dtype: jnp.dtype
) -> jax.Array | QuantArray:
    """A module's parameter as it is stored: a float array, which a fresh one is, or a QuantArray of this shape.

    Raises:
        ValueError: a QuantArray of another shape (Flax checks arrays itself).
    """
    stored: Any = module.get_variable("params", name)
    if not isinstance(stored, QuantArray):
        array: jax.Array = module.param(name, init, shape, dtype)
        return array
    if stored.shape != shape:
        raise ValueError(f"the QuantArray {name!r} stands for shape {stored.shape}; this layer needs {shape}")
    return stored


def project(
    x: jax.Array, weight: jax.Array | QuantArray, row_maxima: jax.Array | None = None, split_over: str | None = None
) -> jax.Array:
    """``x[T, in] . weight[out, in]^T``, ``[T, out]``; the weight may have several axes of either kind.
    `row_maxima`, `split_over`: see `jaxinfer.quant.matmul.project`.

    XLA's CPU backend rearranges a product's right operand at every use and reads the left one where it lies. So a step
    of few tokens is computed as ``(weight . x^T)^T`` there, in a tenth to two fifths less time.
    """
    if isinstance(weight, QuantArray):
        return matmul.project(x, weight, row_maxima, split_over)
    weight = weight.reshape(-1, x.shape[1])
    if x.shape[0] > FEW_TOKENS:
        return _weights_right(x, weight)
    return jax.lax.platform_dependent(x, weight, cpu=_weights_left, default=_weights_right)


def _weights_right(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())))


def _weights_left(x: jax.Array, weight: jax.Array) -> jax.Array:
    columns = jax.lax.optimization_barrier(x.T)  # without the barriers XLA rewrites it to have the weights on the right
    return jax.lax.optimization_barrier(weight @ columns).T


class Linear(nn.Module):
    """``y = x . kernel^T + bias`` with fused, shardable axes.

    The kernel has shape ``[*out_shape, *in_shape]``; `x` is ``[T, *in_shape]`` and the result ``[T, *out_shape]``.
    With every weight as ``[out, in]`` the CPU can read it in place (`project`); a GPU does not care.

    Attributes:
        out_shape: output axes, e.g. ``(K, G + 2, H)`` of the fused qkv projection.
        in_shape: input axes.
        use_bias: whether a ``bias[*out_shape]`` is added.
        param_dtype: dtype of freshly initialised parameters.
        sum_over: inside `jax.shard_map`, the mesh axis over which the input axes are split: the devices' products are
            added up.
        leaves_sum: they are not added up, since the caller adds up what it makes of them.
    """

    out_shape: Sequence[int]
    in_shape: Sequence[int]
    use_bias: bool = False
    param_dtype: jnp.dtype = jnp.float32
    sum_over: str | None = None
    leaves_sum: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, row_maxima: jax.Array | None = None) -> jax.Array:
        """`row_maxima`: of x, see `project`."""
        shape = (*self.out_shape, *self.in_shape)
        fan_in = math.prod(self.in_shape)
        kernel = parameter(self, "kernel", nn.initializers.normal(fan_in**-0.5), shape, self.param_dtype)
        y = project(x.reshape(-1, fan_in), kernel, row_maxima, self.sum_over)
        if self.sum_over is not None and not self.leaves_sum:
            y = jax.lax.psum(y, self.sum_over)
        y = y.reshape(x.shape[0], *self.out_shape)
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, tuple(self.out_shape), self.param_dtype)
        return y
