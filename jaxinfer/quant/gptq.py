"""GPTQ (arXiv:2210.17323): weights are rounded one input after the other, and those not rounded yet make up for it.

The paper's algorithm 1: ``H = sum_x x x^T`` is the Hessian of a channel's squared output error, and ``U`` is upper
triangular with ``U^T U = H^-1``; rounding input i with error e changes input ``j > i`` by ``-e * U[i, j] / U[i, i]``.
Here the inputs lie along the first axis, so that what one step changes is contiguous.

What the paper leaves open is the grid. A group's range may be narrowed (`narrowed_grid`): with few codes the largest
weights may lose more than the others gain from a finer grid, or less, by how strong their inputs are.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.quant.grid import Grid, codes_on, grid_of, values_on

BLOCK = 128
"""Inputs whose errors are passed on to all later ones together."""

SHARES = tuple(1 - step / 40 for step in range(17))
"""Of a group's range that are tried: 1 to 0.6."""

Find = Callable[[jax.Array, jax.Array], Grid]


class GPTQResult(NamedTuple):
    """A rounded matrix.

    Attributes:
        codes: uint8[N, K], with an order and groups that follow it in this order, else in that of the inputs.
        grid: ``[N, K / group]``.
    """

    codes: jax.Array
    grid: Grid


@partial(jax.jit, static_argnames=("bits", "group", "symmetric", "static_groups", "narrow"))
def gptq(
    weights: jax.Array,
    hessian: jax.Array,
    order: jax.Array | None = None,
    *,
    bits: int = 4,
    group: int = 128,
    symmetric: bool = True,
    static_groups: bool = False,
    narrow: bool = False,
    damping: float = 0.01,
) -> GPTQResult:
    """Rounds a matrix so that its outputs change little.

    Args:
        weights: float32[N, K].
        hessian: float32[K, K], the sum of ``x x^T`` over inputs, or any multiple of it. An input that is always 0 gets
            weights of 0.
        order: int32[K], in which inputs are rounded; None for as they come. The paper's successors take the strongest
            first (`strongest_first`).
        bits: 4 or 8.
        group: inputs that share a scale, which is found when the first of them is reached; divides K.
        symmetric: see `grid_of`.
        static_groups: groups are of neighbouring inputs whatever the order, and their scales are found beforehand;
            else they are of inputs that are neighbours in the order.
        narrow: groups' ranges are those of `narrowed_grid`, else those of their weights.
        damping: share of the mean of the diagonal that is added to it.
    """
    columns = weights.shape[1]
    diagonal = jnp.diagonal(hessian)
    dead = diagonal == 0
    weights = jnp.where(dead, 0.0, weights)
    mean = diagonal.sum() / jnp.maximum((~dead).sum(), 1)
    mean = jnp.where(mean > 0, mean, 1.0)
    hessian = hessian / mean + jnp.diag(jnp.where(dead, 1.0, 0.0) + damping)
    by_input = weights.T
    find = partial(narrowed_grid if narrow else _grid, bits=bits, symmetric=symmetric)
    known = None
    if static_groups:
        known = jax.vmap(find)(by_input.reshape(-1, group, weights.shape[0]), jnp.diagonal(hessian).reshape(-1, group))
    groups = jnp.arange(columns) // group
    if order is not None:
        by_input, hessian = by_input[order], hessian[order][:, order]
        groups = groups[order] if static_groups else groups
    factor, strengths = inverse_factor(hessian), jnp.diagonal(hessian)
    codes, grid = _round_inputs(by_input, factor, strengths, groups, known, find, bits, group)
    if order is not None and static_groups:
        codes = jnp.zeros_like(codes).at[order].set(codes)
    return GPTQResult(codes.T, Grid(grid.scale.T, grid.zero.T))


def strongest_first(hessian: jax.Array) -> jax.Array:
    """int32[K]: the inputs by falling strength, equally strong ones as they come ("act-order")."""
    return jnp.argsort(-jnp.diagonal(hessian), stable=True).astype(jnp.int32)


def inverse_factor(hessian: jax.Array) -> jax.Array:
    """``U``, upper triangular, with ``U^T U = H^-1``: the inverse of H's triangular factor from its last row on."""
    lower = jnp.linalg.cholesky(hessian[::-1, ::-1])
    identity = jnp.eye(len(hessian), dtype=hessian.dtype)
    return lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True)[::-1, ::-1]


def narrowed_grid(weights: jax.Array, strengths: jax.Array, *, bits: int, symmetric: bool) -> Grid:
    """For each column the grid over one of `SHARES` of its range that has the least squared error, inputs weighed by
    their strengths, where the rest is rounded to its ends; the widest of equally good ones.

    Args:
        weights: float32[group, N].
        strengths: float32[group], of the squares of the inputs.
        bits, symmetric: see `grid_of`.
    """
    low, high = weights.min(0), weights.max(0)

    def better(index: jax.Array, best: tuple[jax.Array, Grid]) -> tuple[jax.Array, Grid]:
        share = jnp.array(SHARES, jnp.float32)[index]
        grid = grid_of(low * share, high * share, bits=bits, symmetric=symmetric)
        error = (strengths[:, None] * (values_on(codes_on(weights, grid, bits), grid) - weights) ** 2).sum(0)
        wins = error < best[0]
        return jnp.where(wins, error, best[0]), Grid(
            *(jnp.where(wins, *pair) for pair in zip(grid, best[1], strict=True))
        )

    first = jnp.full(low.shape, jnp.inf), grid_of(low, high, bits=bits, symmetric=symmetric)
    return lax.fori_loop(0, len(SHARES), better, first)[1]


def _grid(weights: jax.Array, strengths: jax.Array, *, bits: int, symmetric: bool) -> Grid:
    """Of one group, ``[group, N]``."""
    return grid_of(weights.min(0), weights.max(0), bits=bits, symmetric=symmetric)


def _round_inputs(
    weights: jax.Array,
    factor: jax.Array,
    strengths: jax.Array,
    groups: jax.Array,
    known: Grid | None,
    find: Find,
    bits: int,
    group: int,
) -> tuple[jax.Array, Grid]:
    """Codes ``[K, N]`` of weights ``[K, N]`` and the grid ``[K / group, N]``: the one that is known, or what is found
    on the way. `groups` and `strengths` are those of the inputs."""
    columns, rows = weights.shape
    block = _block(columns, group)

    def next_block(index: jax.Array, carry: tuple[jax.Array, jax.Array, Grid]) -> tuple[jax.Array, jax.Array, Grid]:
        weights, codes, grid = carry
        start = index * block
        if known is None and group > block:
            found = partial(_found, find=find, group=group)
            grid = lax.cond(start % group == 0, found, lambda *given: given[2], weights, strengths, grid, start)
        cut = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=block)
        piece, passed_on = cut(weights), cut(factor)
        slopes = lax.dynamic_slice_in_dim(passed_on, start, block, axis=1)
        span = group if known is None and group < block else block
        rounded, errors = jnp.zeros_like(piece), jnp.zeros_like(piece)
        for first in range(0, block, span):
            if known is None and group <= block:
                strong = lax.dynamic_slice_in_dim(strengths, start + first, span)
                grid = _put(grid, find(piece[first : first + span], strong), (start + first) // group)
            step = partial(_round_one, slopes=slopes, grid=grid, groups=cut(groups), bits=bits)
            piece, rounded, errors = lax.fori_loop(first, first + span, step, (piece, rounded, errors))
        codes = lax.dynamic_update_slice_in_dim(codes, rounded.astype(jnp.uint8), start, 0)
        later = jnp.where(jnp.arange(columns) >= start + block, passed_on, 0.0)
        return weights - jnp.matmul(later.T, errors, precision="highest"), codes, grid

    empty = jnp.zeros((columns // group, rows), weights.dtype)
    carry = weights, jnp.zeros(weights.shape, jnp.uint8), known or Grid(empty, empty)
    _, codes, grid = lax.fori_loop(0, columns // block, next_block, carry)
    return codes, grid


def _round_one(
    i: jax.Array,
    state: tuple[jax.Array, jax.Array, jax.Array],
    *,
    slopes: jax.Array,
    grid: Grid,
    groups: jax.Array,
    bits: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rounds input i of a block and passes its error on to the others of the block."""
    piece, rounded, errors = state
    own = Grid(grid.scale[groups[i]], grid.zero[groups[i]])
    code = codes_on(piece[i], own, bits)
    error = (piece[i] - values_on(code, own)) / slopes[i, i]
    # What stands left of the diagonal is 0: inputs that are rounded already keep their values.
    return piece - slopes[i][:, None] * error, rounded.at[i].set(code), errors.at[i].set(error)


def _found(weights: jax.Array, strengths: jax.Array, grid: Grid, start: jax.Array, *, find: Find, group: int) -> Grid:
    cut = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=group)
    return _put(grid, find(cut(weights), cut(strengths)), start // group)


def _put(grid: Grid, found: Grid, index: jax.Array) -> Grid:
    return Grid(grid.scale.at[index].set(found.scale), grid.zero.at[index].set(found.zero))


def _block(columns: int, group: int) -> int:
    """Inputs of a block: at most `BLOCK` if there is such a divisor, whole groups or an equal part of one."""
    if group > BLOCK:
        return max(size for size in range(1, BLOCK + 1) if group % size == 0)
    groups = columns // group
    return group * max(count for count in range(1, BLOCK // group + 1) if groups % count == 0)
