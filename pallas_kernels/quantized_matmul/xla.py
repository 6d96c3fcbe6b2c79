"""The operation in plain XLA, for every device and shape."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantized_matmul.operands import (
    Surroundings,
    Weights,
    gated,
    normalised,
    rounded_rows,
    row_maxima,
    without_tables,
)
from pallas_kernels.quantized_matmul.reference import dequantize

MAX_COPY_BYTES = 16 << 20
"""Of weights that are dequantised at a time: enough rows for a large product, little beside what stays packed."""


def quantized_matmul_xla(x: jax.Array, weights: Weights, around: Surroundings, out_dtype: Any) -> Any:
    """Same contract as `quantized_matmul`."""
    return surrounded(x, weights, around, out_dtype, product_xla)


def surrounded(x: jax.Array, weights: Weights, around: Surroundings, out_dtype: Any, product: Any) -> Any:
    """`product` with what is around it in plain XLA.

    Args:
        product: ``(x, weights, out_dtype) -> [M, N]`` of what is not rounded to 8 bits.
    """
    x = normalised(x, around)
    if around.act_dtype is None:
        out = product(x, weights, out_dtype)
    else:
        out = _coded_product(x, weights, around.act_dtype).astype(out_dtype)
    out = gated(out, around)
    return (out, row_maxima(out)[None]) if around.gives_maxima else out


def product_xla(x: jax.Array, weights: Weights, out_dtype: Any) -> jax.Array:
    """``x . w^T``. One scale a row of 8 bits is applied to the product, and XLA converts the codes while it multiplies.
    Scales of groups, and codes that share bytes, would have it make a copy of all weights: here it is of some rows at a
    time."""
    x, weights = without_tables(x, weights)
    codes, scale, offset, codebook, bits = (
        weights.codes,
        weights.scale,
        weights.offset,
        weights.codebook,
        weights.bits,
    )
    if bits == 8 and scale.shape[1] == 1:
        return _per_row(x, codes, scale, offset).astype(out_dtype)
    # Scales may lie far from 1, beyond float16; bfloat16 has float32's range.
    dtype = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
    wide = x.astype(dtype)

    def some_rows(rows: tuple[jax.Array, jax.Array, jax.Array | None]) -> jax.Array:
        values = dequantize(*rows, codebook, bits=bits).astype(dtype)
        return _product(wide, values).astype(out_dtype)

    rows = (codes, scale, offset)
    num_rows, tokens = codes.shape[0], x.shape[0]
    at_a_time = max(MAX_COPY_BYTES // (x.shape[1] * jnp.dtype(dtype).itemsize), 1)
    if num_rows <= at_a_time:
        return some_rows(rows)

    def step(index: jax.Array, out: jax.Array) -> jax.Array:
        # The last turn goes back a little, and computes some rows for a second time.
        first = jnp.minimum(index * at_a_time, num_rows - at_a_time)
        part = jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, first, at_a_time), rows)
        return lax.dynamic_update_slice_in_dim(out, some_rows(part), first, axis=1)

    return lax.fori_loop(0, -(-num_rows // at_a_time), step, jnp.zeros((tokens, num_rows), out_dtype))


def _per_row(x: jax.Array, codes: jax.Array, scale: jax.Array, offset: jax.Array | None) -> jax.Array:
    """float32[M, N] for 8 bits with scales and offsets [N, 1]."""
    out = _product(x, codes.astype(x.dtype)) * scale[:, 0].astype(jnp.float32)
    if offset is None:
        return out
    return out + jnp.sum(x.astype(jnp.float32), axis=1, keepdims=True) * offset[:, 0].astype(jnp.float32)


def _coded_product(x: jax.Array, weights: Weights, act_dtype: str) -> jax.Array:
    """float32[M, N] of rows rounded to codes; integers add up exactly, so a row does not depend on the others."""
    x, weights = without_tables(x, weights)
    codes, row_scale = rounded_rows(x, act_dtype)
    total = jnp.int32 if act_dtype == "int8" else jnp.float32
    out = lax.dot_general(codes, weights.codes, (((1,), (1,)), ((), ())), preferred_element_type=total)
    return out.astype(jnp.float32) * (row_scale[:, None] * weights.scale[:, 0].astype(jnp.float32))


def _product(x: jax.Array, weights: jax.Array) -> jax.Array:
    return lax.platform_dependent(x, weights, cpu=_float32_product, default=_any_product)


def _float32_product(x: jax.Array, weights: jax.Array) -> jax.Array:
    """XLA's CPU backend refuses some products of bfloat16."""
    return _any_product(x.astype(jnp.float32), weights.astype(jnp.float32))


def _any_product(x: jax.Array, weights: jax.Array) -> jax.Array:
    return lax.dot_general(x, weights, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
