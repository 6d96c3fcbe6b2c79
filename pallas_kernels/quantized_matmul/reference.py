"""The operation in plain jax.numpy: the specification. It makes a float32 copy of the weights."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def quantized_matmul_reference(
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array,
    offset: jax.Array | None,
    codebook: jax.Array | None,
    *,
    bits: int,
    out_dtype: Any,
) -> jax.Array:
    """Same contract as `quantized_matmul`; the group follows from the shapes."""
    weights = dequantize(codes, scale, offset, codebook, bits=bits)
    out = lax.dot_general(x.astype(jnp.float32), weights, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
    return out.astype(out_dtype)


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
