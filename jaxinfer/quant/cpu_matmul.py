"""Products of activations with a QuantArray on the CPU."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.quant import mixed_dot
from jaxinfer.quant.array import QuantArray, code_values, dequantize
from jaxinfer.quant.int8_product import (
    LIMIT,
    channel_scales,
    code_matrix,
    dot,
    is_channel_int8,
    quantize_rows,
    row_scales,
)

FEW_ROWS = 8
"""Up to so many rows activations of 16 bits are multiplied as two int8 halves, and above it in float32, by a processor
that multiplies int8 with int8 at half the speed of uint8 with int8."""
SIGN = 0x80


def cpu_product(x: jax.Array, weight: QuantArray, row_maxima: jax.Array | None = None) -> jax.Array:
    """As `project`. XLA's CPU backend is quick with bytes by bytes and with float32, and slow with anything that is
    converted inside a product."""
    if is_channel_int8(weight) and weight.act_bits == 8:
        out = _rounded_product(x, weight, None if row_maxima is None else row_maxima.max(0))
    elif is_channel_int8(weight) and (x.shape[0] <= FEW_ROWS or _takes_mixed(weight)):
        out = _two_halves_product(x, weight)
    else:
        out = _float_product(x, weight)
    return out.astype(x.dtype)


def _rounded_product(x: jax.Array, weight: QuantArray, maxima: jax.Array | None) -> jax.Array:
    """W8A8: activations rounded to int8, each row with a scale of its own. Sums are exact, so a row's result does not
    depend on the others."""
    codes, scale = quantize_rows(x, maxima)
    return _sums(codes, weight) * (scale[:, None] * channel_scales(weight))


def _two_halves_product(x: jax.Array, weight: QuantArray) -> jax.Array:
    """Activations as ``(high + low / 254) * scale`` of two int8 numbers: about 15 bits of them."""
    scale = row_scales(x)
    exact = x.astype(jnp.float32) / scale[:, None]
    high = jnp.round(exact)
    low = jnp.round((exact - high) * (2 * LIMIT))
    sums = _sums(jnp.concatenate([high, low]).astype(jnp.int8), weight)
    total = sums[: len(x)] + sums[len(x) :] / (2 * LIMIT)
    return total * (scale[:, None] * channel_scales(weight))


def _sums(codes: jax.Array, weight: QuantArray) -> jax.Array:
    """float32 `[T, N]` of int8 codes `[T, K]` with those of the weight, summed exactly.

    Where uint8 with int8 is the quick product the codes are shifted by 128, and a row of 128s tells what that adds. It
    keeps a product of one row, which is slow, from being one; where there is none, a row of zeros does.
    """
    matrix = code_matrix(weight)
    if _takes_mixed(weight):
        shifted = lax.bitcast_convert_type(codes, jnp.uint8) ^ SIGN
        ones = jnp.full((1, codes.shape[1]), SIGN, jnp.uint8)
        sums = mixed_dot.mixed_dot(jnp.concatenate([shifted, ones]), matrix)
        return (sums[:-1] - sums[-1:]).astype(jnp.float32)
    rows = codes.shape[0]
    if rows == 1:
        codes = jnp.concatenate([codes, jnp.zeros_like(codes)])
    return dot(codes, matrix, jnp.int32)[:rows].astype(jnp.float32)


def _takes_mixed(weight: QuantArray) -> bool:
    return mixed_dot.is_fast() and weight.row <= mixed_dot.LONGEST_ROW


def _float_product(x: jax.Array, weight: QuantArray) -> jax.Array:
    """In float32, with the weights converted beforehand; but not before x is there, or all of a program's matrices
    would be converted at its beginning."""
    rows = x.shape[0]
    x = x.astype(jnp.float32)
    if rows == 1:  # slow as a single one
        x = jnp.concatenate([x, jnp.zeros_like(x)])
    weight = replace(weight, codes=weight.codes + _zero_of(x).astype(weight.codes.dtype))
    if weight.group == weight.row and weight.offset is None:
        values = lax.optimization_barrier(code_values(weight))
        return dot(x, values, jnp.float32)[:rows] * channel_scales(weight)
    values = lax.optimization_barrier(dequantize(weight)).reshape(weight.channels, weight.row)
    return dot(x, values, jnp.float32)[:rows]


def _zero_of(x: jax.Array) -> jax.Array:
    """uint32 0 that XLA computes from x: what it is added to waits for x."""
    bits = lax.bitcast_convert_type(x[0, 0], jnp.uint32)
    return lax.population_count(bits) >> 6
