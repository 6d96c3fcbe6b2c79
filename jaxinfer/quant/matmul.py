"""Products of activations with a QuantArray."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.quant.array import CodedScale, QuantArray, code_values, dequantize, scales_of
from pallas_kernels.quantized_matmul import quantized_matmul

FEW_ROWS = 8
"""Up to so many rows the CPU multiplies activations of 16 bits as two int8 halves, and above it in float32."""
LIMIT = 127


def project(x: jax.Array, weight: QuantArray) -> jax.Array:
    """``x[T, K] . weight[N, K]^T``, ``[T, N]`` in x's dtype, accumulated in int32 or float32."""
    return lax.platform_dependent(x, weight, cpu=_on_cpu, default=_elsewhere)


def _on_cpu(x: jax.Array, weight: QuantArray) -> jax.Array:
    """XLA's CPU backend is quick with int8 by int8 and with float32, and slow with anything converted inside a product.
    A single row is slow, too."""
    rows = x.shape[0]
    if rows == 1:
        x = jnp.concatenate([x, jnp.zeros_like(x)])
    if _per_channel_int8(weight) and weight.act_bits == 8:
        out = _int8_product(x, weight)
    elif _per_channel_int8(weight) and rows <= FEW_ROWS:
        out = _two_halves_product(x, weight)
    else:
        out = _float_product(x, weight)
    return out[:rows].astype(x.dtype)


def _elsewhere(x: jax.Array, weight: QuantArray) -> jax.Array:
    if _per_channel_int8(weight) and weight.act_bits == 8:
        return _int8_product(x, weight).astype(x.dtype)
    matrix = _matrix(weight)
    if matrix.dtype == jnp.float8_e4m3fn:
        return (_dot(x, matrix.astype(x.dtype), jnp.float32) * _channel_scales(weight)).astype(x.dtype)
    scale = scales_of(weight) if isinstance(weight.scale, CodedScale) else weight.scale
    return quantized_matmul(
        x,
        matrix,
        scale.reshape(weight.channels, -1),
        offset=None if weight.offset is None else weight.offset.reshape(weight.channels, -1),
        codebook=weight.codebook,
        bits=weight.bits,
        group=weight.group,
    )


def _int8_product(x: jax.Array, weight: QuantArray) -> jax.Array:
    """W8A8: activations rounded to int8, each row with a scale of its own. Sums are exact, so a row's result does not
    depend on the others."""
    codes, scale = quantize_rows(x)
    return _dot(codes, _matrix(weight), jnp.int32).astype(jnp.float32) * (scale[:, None] * _channel_scales(weight))


def _two_halves_product(x: jax.Array, weight: QuantArray) -> jax.Array:
    """Activations as ``(high + low / 254) * scale`` of two int8 numbers: about 15 bits of them."""
    scale = _row_scales(x)
    exact = x.astype(jnp.float32) / scale[:, None]
    high = jnp.round(exact)
    low = jnp.round((exact - high) * (2 * LIMIT))
    both = jnp.concatenate([high, low]).astype(jnp.int8)
    sums = _dot(both, _matrix(weight), jnp.int32).astype(jnp.float32)
    total = sums[: len(x)] + sums[len(x) :] / (2 * LIMIT)
    return total * (scale[:, None] * _channel_scales(weight))


def _float_product(x: jax.Array, weight: QuantArray) -> jax.Array:
    """In float32, with the weights converted beforehand; but not before x is there, or all of a program's matrices
    would be converted at its beginning."""
    x = x.astype(jnp.float32)
    weight = replace(weight, codes=weight.codes + _zero_of(x).astype(weight.codes.dtype))
    if weight.group == weight.row and weight.offset is None:
        values = lax.optimization_barrier(code_values(weight))
        return _dot(x, values, jnp.float32) * _channel_scales(weight)
    return _dot(x, lax.optimization_barrier(dequantize(weight)).reshape(weight.channels, weight.row), jnp.float32)


def _zero_of(x: jax.Array) -> jax.Array:
    """uint32 0 that XLA computes from x: what it is added to waits for x."""
    bits = lax.bitcast_convert_type(x[0, 0], jnp.uint32)
    return lax.population_count(bits) >> 6


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 codes ``[T, K]``, rounded to nearest, ties to even, and float32 scales ``[T]``: the largest magnitude of a
    row over 127; 1 for a row of zeros, and infinite for one with NaN or infinity, whose products are not finite."""
    scale = _row_scales(x)
    return jnp.round(x.astype(jnp.float32) / scale[:, None]).astype(jnp.int8), scale


def _row_scales(x: jax.Array) -> jax.Array:
    # XLA's vectorised maximum passes over NaN on the CPU, but not over infinity.
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf), axis=-1) / LIMIT
    return jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)


def _per_channel_int8(weight: QuantArray) -> bool:
    return weight.codes.dtype == jnp.int8 and weight.group == weight.row and weight.offset is None


def _matrix(weight: QuantArray) -> jax.Array:
    return weight.codes.reshape(weight.channels, -1)


def _channel_scales(weight: QuantArray) -> jax.Array:
    return scales_of(weight).reshape(-1)


def _dot(x: jax.Array, matrix: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
