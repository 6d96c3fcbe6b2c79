"""Evenly spaced values that groups of weights are rounded to, as AWQ and GPTQ checkpoints store them. JAX.

``value = (code - zero) * scale`` with codes ``0 .. 2^bits - 1``, a whole zero point among them and a float16 scale.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

SMALLEST, LARGEST = 2.0**-14, 8000.0
"""Scales: float16 is as precise as it gets from the one on, and eight times the other is still one."""


class Grid(NamedTuple):
    """float32 scales, float16 numbers all, and whole zero points, of the same shape: one of each for a group."""

    scale: jax.Array
    zero: jax.Array


def grid_of(low: jax.Array, high: jax.Array, *, bits: int, symmetric: bool) -> Grid:
    """The grid of groups whose values lie between `low` and `high`, float32 of one shape.

    The range is widened to hold 0, which is on the grid; a symmetric one reaches as far in both directions, and its
    zero point is in the middle of the codes.
    """
    low, high = jnp.minimum(low, 0.0), jnp.maximum(high, 0.0)
    largest = 2**bits - 1
    if symmetric:
        high = jnp.maximum(-low, high)
        low = -high
    # Not by way of float16: XLA may leave out a conversion there and back.
    exact = jnp.clip(high / largest - low / largest, SMALLEST, LARGEST)
    scale = jax.lax.reduce_precision(exact, exponent_bits=5, mantissa_bits=10)
    if symmetric:
        return Grid(scale, jnp.full_like(scale, (largest + 1) / 2))
    return Grid(scale, jnp.clip(jnp.round(-low / scale), 0, largest))


def codes_on(values: jax.Array, grid: Grid, bits: int) -> jax.Array:
    """float32 codes of the nearest values on the grid, whose shape broadcasts to theirs."""
    return jnp.clip(jnp.round(values / grid.scale) + grid.zero, 0, 2**bits - 1)


def values_on(codes: jax.Array, grid: Grid) -> jax.Array:
    """What codes stand for."""
    return (codes - grid.zero) * grid.scale


def rounded(weights: jax.Array, *, bits: int, group: int, symmetric: bool) -> tuple[jax.Array, Grid]:
    """Rounding to nearest.

    Args:
        weights: float32[..., K].
        bits: of a code.
        group: divides K.
        symmetric: see `grid_of`.

    Returns:
        uint8 codes ``[..., K]`` and the grid ``[..., K / group]``.
    """
    groups = weights.reshape(*weights.shape[:-1], -1, group)
    grid = grid_of(groups.min(-1), groups.max(-1), bits=bits, symmetric=symmetric)
    codes = codes_on(groups, Grid(grid.scale[..., None], grid.zero[..., None]), bits)
    return codes.astype(jnp.uint8).reshape(weights.shape), grid


def restored(codes: jax.Array, grid: Grid) -> jax.Array:
    """float32 values ``[..., K]`` of what `rounded` returns."""
    groups = codes.reshape(*grid.scale.shape, -1).astype(jnp.float32)
    return values_on(groups, Grid(grid.scale[..., None], grid.zero[..., None])).reshape(codes.shape)


def output_error(difference: jax.Array, gram: jax.Array) -> jax.Array:
    """``sum_x (difference . x)^2`` for each row, float32[..., N].

    Args:
        difference: float32[..., N, K] between two matrices.
        gram: float32[..., K, K], the sum of ``x x^T`` over inputs x.
    """
    product = jnp.matmul(difference, gram, precision="highest")
    return jnp.maximum((product * difference).sum(-1), 0.0)
