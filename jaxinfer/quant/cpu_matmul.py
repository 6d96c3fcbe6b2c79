"""Products of activations with a QuantArray on the CPU."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.quant.array import QuantArray, code_values, dequantize
from jaxinfer.quant.int8_product import (
    LIMIT,
    channel_scales,
    code_matrix,
    dot,
    int8_product,
    is_channel_int8,
    row_scales,
)

FEW_ROWS = 8
"""Up to so many rows activations of 16 bits are multiplied as two int8 halves, and above it in float32."""


def cpu_product(x: jax.Array, weight: QuantArray) -> jax.Array:
    """XLA's CPU backend is quick with int8 by int8 and with float32, and slow with anything converted inside a product.
    A single row is slow, too."""
    rows = x.shape[0]
    if rows == 1:
        x = jnp.concatenate([x, jnp.zeros_like(x)])
    if is_channel_int8(weight) and weight.act_bits == 8:
        out = int8_product(x, weight)
    elif is_channel_int8(weight) and rows <= FEW_ROWS:
        out = _two_halves_product(x, weight)
    else:
        out = _float_product(x, weight)
    return out[:rows].astype(x.dtype)


def _two_halves_product(x: jax.Array, weight: QuantArray) -> jax.Array:
    """Activations as ``(high + low / 254) * scale`` of two int8 numbers: about 15 bits of them."""
    scale = row_scales(x)
    exact = x.astype(jnp.float32) / scale[:, None]
    high = jnp.round(exact)
    low = jnp.round((exact - high) * (2 * LIMIT))
    both = jnp.concatenate([high, low]).astype(jnp.int8)
    sums = dot(both, code_matrix(weight), jnp.int32).astype(jnp.float32)
    total = sums[: len(x)] + sums[len(x) :] / (2 * LIMIT)
    return total * (scale[:, None] * channel_scales(weight))


def _float_product(x: jax.Array, weight: QuantArray) -> jax.Array:
    """In float32, with the weights converted beforehand; but not before x is there, or all of a program's matrices
    would be converted at its beginning."""
    x = x.astype(jnp.float32)
    weight = replace(weight, codes=weight.codes + _zero_of(x).astype(weight.codes.dtype))
    if weight.group == weight.row and weight.offset is None:
        values = lax.optimization_barrier(code_values(weight))
        return dot(x, values, jnp.float32) * channel_scales(weight)
    return dot(x, lax.optimization_barrier(dequantize(weight)).reshape(weight.channels, weight.row), jnp.float32)


def _zero_of(x: jax.Array) -> jax.Array:
    """uint32 0 that XLA computes from x: what it is added to waits for x."""
    bits = lax.bitcast_convert_type(x[0, 0], jnp.uint32)
    return lax.population_count(bits) >> 6
