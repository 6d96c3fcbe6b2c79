"""Random arrays made on the device by one kernel each, whatever their size: every value is a hash of its index."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SEED = jax.ShapeDtypeStruct((), jnp.int32)
"""The argument of programs that make random arrays."""


@partial(jax.jit, static_argnums=(0, 1))
def random_values(shape: tuple[int, ...], dtype: Any, seed: int | jax.Array) -> jax.Array:
    """Uniform in -1 .. 1 for floats (-8 .. 8 for float8), all codes but the least for int8, all bytes for uint8."""
    bits = jnp.asarray(seed, jnp.uint32) * jnp.uint32(0x9E3779B9)
    for axis in range(len(shape)):
        bits = _mix(bits ^ (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) + jnp.uint32(axis << 28)))
    if dtype == jnp.uint8:
        return (bits >> 24).astype(jnp.uint8)
    if dtype == jnp.int8:
        return (((bits >> 8) % 255).astype(jnp.int32) - 127).astype(jnp.int8)
    uniform = (bits >> 8).astype(jnp.float32) * 2.0**-23 - 1.0
    return (uniform * (8.0 if jnp.dtype(dtype).itemsize == 1 else 1.0)).astype(dtype)


def _mix(bits: jax.Array) -> jax.Array:
    """A bijection of 32 bits in which every bit of the result depends on every bit of the argument (MurmurHash3's)."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def random_scales(shape: tuple[int, ...], limit: float, seed: int | jax.Array) -> jax.Array:
    """float32, between 0.5 and 1.5 over the largest code."""
    return (1.0 + 0.5 * random_values(shape, jnp.dtype(jnp.float32), seed)) / limit


def random_tables(rng: np.random.Generator, sets: int, rows: int, width: int) -> np.ndarray:
    """int32[sets, rows, width]: every page from 1 on once, in random order."""
    return (1 + rng.permutation(sets * rows * width)).astype(np.int32).reshape(sets, rows, width)
