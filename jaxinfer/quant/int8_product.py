"""What products of int8 weights with int8 activations are made of."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.quant.array import QuantArray, scales_of

LIMIT = 127


def quantize_rows(x: jax.Array, maxima: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """int8 codes ``[T, K]``, rounded to nearest, ties to even, and float32 scales ``[T]``: the largest magnitude of a
    row over 127; 1 for a row of zeros, and infinite for one with NaN or infinity, whose products are not finite.
    `maxima`: float32[T], those magnitudes, where x is a part of the rows."""
    scale = row_scales(x, maxima)
    return jnp.round(x.astype(jnp.float32) / scale[:, None]).astype(jnp.int8), scale


def largest_magnitudes(x: jax.Array) -> jax.Array:
    """float32[T], of the rows of ``x[T, K]``; infinity where there is NaN."""
    # XLA's vectorised maximum passes over NaN on the CPU, but not over infinity.
    x = x.astype(jnp.float32)
    return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf), axis=-1)


def row_scales(x: jax.Array, maxima: jax.Array | None = None) -> jax.Array:
    """The scales of `quantize_rows`."""
    scale = (largest_magnitudes(x) if maxima is None else maxima) / LIMIT
    return jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)


def is_channel_int8(weight: QuantArray) -> bool:
    """Whether it is integers of 8 bits with one scale for each output channel."""
    return weight.codes.dtype == jnp.int8 and weight.group == weight.row and weight.offset is None


def code_matrix(weight: QuantArray) -> jax.Array:
    """The codes, `[N, K]`, or `[N, K / 2]` of 4 bits."""
    return weight.codes.reshape(weight.channels, -1)


def channel_scales(weight: QuantArray) -> jax.Array:
    """float32 `[N]` of a matrix with one scale for each output channel."""
    return scales_of(weight).reshape(-1)


def dot(x: jax.Array, matrix: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``x[T, K] . matrix[N, K]^T``, ``[T, N]`` of `dtype`, in which it is accumulated."""
    return lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
