"""The operation in plain jax.numpy: the specification. It makes a float32 copy of the weights."""

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


def quantized_matmul_reference(x: jax.Array, weights: Weights, around: Surroundings, out_dtype: Any) -> Any:
    """Same contract as `quantized_matmul`."""
    x, weights = without_tables(normalised(x, around), weights)
    wide = x.astype(jnp.float32)
    if around.act_dtype is not None:
        codes, row_scale = rounded_rows(x, around.act_dtype)
        wide = codes.astype(jnp.float32) * row_scale[:, None]
    values = dequantize(weights.codes, weights.scale, weights.offset, weights.codebook, bits=weights.bits)
    out = lax.dot_general(wide, values, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
    out = gated(out, around).astype(out_dtype)
    return (out, row_maxima(out)[None]) if around.gives_maxima else out


def dequantize(
    codes: jax.Array, scale: jax.Array, offset: jax.Array | None, codebook: jax.Array | None, *, bits: int
) -> jax.Array:
    """float32[N, K] of weights as `quantized_matmul` takes them."""
    if bits == 4:
        codes = jnp.stack([codes & 0xF, codes >> 4], axis=-1).reshape(codes.shape[0], -1)
    values = codes.astype(jnp.float32) if codebook is None else codebook[codes]
    groups = values.reshape(*scale.shape, -1) * scale.astype(jnp.float32)[..., None]
    if offset is not None:
        groups = groups + offset.astype(jnp.float32)[..., None]
    return groups.reshape(values.shape)
