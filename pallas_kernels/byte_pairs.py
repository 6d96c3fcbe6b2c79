"""Arrays of 8-bit elements that Pallas-Triton can only address as pairs of bytes.

It counts elements in 32 bits for arrays of up to 4 GiB, and Triton takes those for signed: from 2^31 elements on it
would go below the array's beginning. Counted in pairs there are half as many. Beyond 4 GiB offsets have 64 bits.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

SIGNED_LIMIT = 1 << 31
"""Elements that a signed 32-bit number can count."""


def needs_pairs(shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether an array must be counted in pairs of bytes."""
    return jnp.dtype(dtype).itemsize == 1 and SIGNED_LIMIT < math.prod(shape) <= 1 << 32


def as_pairs(array: jax.Array) -> jax.Array:
    """int16[..., W / 2] of 8-bit elements ``[..., W]``, W even: the same memory, the first of two in the low byte."""
    pairs = array.reshape(*array.shape[:-1], array.shape[-1] // 2, 2)
    return lax.bitcast_convert_type(pairs, jnp.int16)


def from_pairs(pairs: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `as_pairs`."""
    return lax.bitcast_convert_type(pairs, dtype).reshape(*pairs.shape[:-1], -1)
