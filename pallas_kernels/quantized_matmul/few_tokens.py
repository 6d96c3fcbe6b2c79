"""Few tokens: the whole tile of them, through a norm, rounding to 8 bits, and a gate if need be, in the one kernel.

Codes meet x, scales meet the groups' sums. What a row of x is multiplied by, which a norm and the rounding do, comes in
at the end.
"""

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_kernels.gated_matmul.reference import ACTIVATIONS
from pallas_kernels.quantized_matmul.code_ptx import fused_multiply_add, round_to_int8
from pallas_kernels.quantized_matmul.kernel_spec import (
    KernelSpec,
    Place,
    Refs,
    decoded,
    factors,
    load_norm,
    load_x,
)
from pallas_kernels.quantized_matmul.operands import CODE_LIMITS

MAXIMA_AT_A_TIME = 16
Sums = tuple[Any, ...]


def scale_sums(spec: KernelSpec, refs: Refs, place: Place, table: Any, first: jax.Array, last: jax.Array) -> jax.Array:
    """float32[tokens, out]."""
    row_scale = None if spec.act_dtype is None else _row_scale(spec, refs, place)
    each_step = spec.grouped or spec.shifted

    def step(index: jax.Array, carry: Sums) -> Sums:
        totals, squares, current = carry
        # Asked for a tile ahead: they are few bytes, and nothing else covers the time that they take.
        following = _all_factors(spec, refs, place, jnp.minimum(index + 1, last - 1)) if each_step else current
        x, squares = _prepared(spec, refs, place, index, row_scale, squares)
        parts = [plt.dot(x, decoded(spec, refs, place, table, index, start), trans_b=True) for start in spec.parts]
        if not each_step:
            return tuple(map(operator.add, totals, parts)), squares, following
        added = [
            fused_multiply_add(part.astype(jnp.float32), scale[None, :], total, spec.interpret)
            for part, total, (scale, _) in zip(parts, totals, current, strict=True)
        ]
        if spec.shifted:
            sums = jnp.sum(x.astype(jnp.float32), axis=1)
            added = [
                fused_multiply_add(sums[:, None], shift[None, :], total, spec.interpret)
                for total, (_, shift) in zip(added, current, strict=True)
            ]
        return tuple(added), squares, following

    exact = spec.act_dtype == "int8" and not each_step
    zero = jnp.zeros((spec.tiles.tokens, spec.tiles.out), jnp.int32 if exact else jnp.float32)
    start = (zero,) * len(spec.parts), jnp.zeros((spec.tiles.tokens,), jnp.float32) if spec.counts_squares else None
    totals, squares, current = lax.fori_loop(first, last, step, (*start, _all_factors(spec, refs, place, first)))
    if not each_step:
        totals = [total.astype(jnp.float32) * scale for total, (scale, _) in zip(totals, current, strict=True)]
    return _finished(spec, refs, place, totals, squares, row_scale)


def _all_factors(spec: KernelSpec, refs: Refs, place: Place, index: jax.Array) -> tuple[tuple[jax.Array, ...], ...]:
    return tuple(factors(spec, refs, place, index, start) for start in spec.parts)


def _prepared(
    spec: KernelSpec, refs: Refs, place: Place, index: jax.Array, row_scale: jax.Array | None, squares: Any
) -> tuple[jax.Array, Any]:
    """A tile of x as products take it, [tokens, into], and the sums of its squares so far."""
    x = load_x(spec, refs, place, index)
    if spec.has_norm:
        wide = x.astype(jnp.float32)
        if spec.counts_squares:
            squares = squares + jnp.sum(wide * wide, axis=1)
        x = (wide * load_norm(spec, refs, index)[None, :]).astype(spec.dtype)
    if row_scale is None:
        return x, squares
    scaled = x.astype(jnp.float32) * (1.0 / row_scale)[:, None]
    if spec.act_dtype == "int8":
        return round_to_int8(scaled), squares
    limit = CODE_LIMITS["float8_e4m3fn"]
    return jnp.clip(scaled, -limit, limit).astype(jnp.float8_e4m3fn), squares


def _row_scale(spec: KernelSpec, refs: Refs, place: Place) -> jax.Array:
    """float32[tokens]: what the largest code of each row stands for; 1 for rows of zeros."""

    def step(turn: jax.Array, largest: jax.Array) -> jax.Array:
        rows = jnp.minimum(turn * MAXIMA_AT_A_TIME + jnp.arange(MAXIMA_AT_A_TIME), spec.num_maxima - 1)
        return jnp.maximum(largest, jnp.max(refs.maxima[rows[:, None], place.tokens[None, :]], axis=0))

    turns = -(-spec.num_maxima // MAXIMA_AT_A_TIME)
    largest = lax.fori_loop(0, turns, step, jnp.zeros((spec.tiles.tokens,), jnp.float32))
    scale = largest / CODE_LIMITS[str(spec.act_dtype)]
    return jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)


def _finished(
    spec: KernelSpec, refs: Refs, place: Place, totals: Any, squares: Any, row_scale: jax.Array | None
) -> jax.Array:
    """What the sums come to: times what belongs to a row, and gated."""
    factor = row_scale
    if spec.has_norm:
        total = squares if spec.counts_squares else refs.squares[place.tokens]
        root = lax.rsqrt(total / spec.channels + spec.epsilon)
        factor = root if factor is None else factor * root
    if factor is not None:
        totals = [total * factor[:, None] for total in totals]
    if spec.activation is None:
        return totals[0]
    return ACTIVATIONS[spec.activation](totals[0]) * totals[1]
