"""Which query tiles a step has and how their contexts are split over the GPU: built on the device, once a step.

A tile is up to ``block_m // G`` consecutive tokens of one row with all query heads of one KV head. What a tile sees of
its row's context is cut into pieces of about equal length, so that the pieces of all tiles fill the GPU a few times
over whatever the mix of contexts is (FlashInfer's plan, arXiv:2501.01005, made where the lengths are). A piece that is
its tile's only one writes the result; the others write partial results, which a merge adds up.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

UNIT = 16
"""Rows of a partial result; a tile of ``block_m`` rows takes ``block_m / UNIT`` of them a piece."""

PART = 64
"""A tile's rows come in parts, each with a whole number of tokens, so that a kernel may take one part at a time."""

ALIGN = 128
"""Pieces are cut at multiples of so many positions from where their tile begins."""

ITEM_FIELDS = 8
MERGE_FIELDS = 8


@dataclass(frozen=True)
class ListPolicy:
    """How a list of tiles is made.

    Attributes:
        block_m: rows of a tile's matrix products.
        pieces: how many pieces all tiles are cut into, for each KV head, beyond one a tile.
        min_piece: positions below which cutting is not worth a partial result.
    """

    block_m: int
    pieces: int
    min_piece: int


@dataclass(frozen=True)
class SplitPolicy:
    """How a step is cut into tiles; `long` is None for a step whose rows are all short."""

    short: ListPolicy
    long: ListPolicy | None


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["items"], meta_fields=["block_m", "tokens", "num_units"]
)
@dataclass(frozen=True)
class TileList:
    """Pieces of tiles of one size.

    Attributes:
        items: int32[W, 8], longest first: row, first token, number of tokens (0: no such piece), position of the first
            token, first and end position of the piece, first unit of its partial result or -1 where it has none, 0.
        block_m: rows of the tiles.
        tokens: the most tokens a tile has.
        num_units: partial results of this list.
    """

    items: jax.Array
    block_m: int
    tokens: int
    num_units: int


@functools.partial(jax.tree_util.register_dataclass, data_fields=["short", "long", "merges"], meta_fields=[])
@dataclass(frozen=True)
class SplitPlan:
    """A step's work.

    Attributes:
        short, long: tiles of rows with few new tokens, and of the others (None in a decode step).
        merges: int32[E, 8], tiles of several pieces: first token, number of tokens (0: no such tile), first unit, units
            from piece to piece, pieces, 0, 0, 0.
    """

    short: TileList
    long: TileList | None
    merges: jax.Array

    @property
    def num_units(self) -> int:
        """Partial results of all lists."""
        return self.short.num_units + (self.long.num_units if self.long is not None else 0)

    @property
    def merge_rows(self) -> int:
        """The most rows (tokens times G) that a tile to be merged has."""
        return max(tiles.block_m for tiles in (self.short, self.long) if tiles is not None)


def tokens_of(block_m: int, group: int) -> int:
    """The most tokens of a tile of `block_m` rows."""
    return max(block_m // PART, 1) * (min(block_m, PART) // group)


class _Rows(NamedTuple):
    """Rows that a list is for, the padding tokens being one more; int32[R] each."""

    start: jax.Array
    tokens: jax.Array
    context: jax.Array


def make_split_plan(
    query_start: jax.Array,
    context_lens: jax.Array,
    *,
    num_tokens: int,
    group: int,
    window: int | None,
    policy: SplitPolicy,
) -> SplitPlan:
    """Builds the plan on the device.

    Args:
        query_start: int32[B + 1], as in `paged_attention`.
        context_lens: int32[B].
        num_tokens: T, static.
        group: query heads of a KV head, at most the `block_m` of the policy.
        window: positions that a token sees, None for all.
        policy: sizes; its `long` may be None only where ``T <= B``.

    Returns:
        a plan whose sizes depend on nothing but the static arguments.
    """
    num_rows = context_lens.shape[0]
    count = jnp.diff(query_start)
    padding = num_tokens - query_start[-1]
    start = query_start.astype(jnp.int32)
    context = jnp.append(context_lens, 0).astype(jnp.int32)
    if policy.long is None:
        rows = _Rows(start, jnp.append(count, padding).astype(jnp.int32), context)
        # A row without tokens has no tile, so T tokens never make more than T.
        short, merges = _make_list(rows, num_tokens, group, window, policy.short, 0)
        return SplitPlan(short, None, merges)
    limit = policy.short.block_m // group
    zero = jnp.zeros((1,), count.dtype)
    few = jnp.append(jnp.where(count <= limit, count, 0), zero).astype(jnp.int32)
    many = jnp.append(jnp.where(count > limit, count, 0), padding).astype(jnp.int32)
    tokens = tokens_of(policy.long.block_m, group)
    long_tiles = num_tokens // tokens + min(num_rows, num_tokens // (limit + 1)) + 1
    short, short_merges = _make_list(
        _Rows(start, few, context), min(num_rows, num_tokens), group, window, policy.short, 0
    )
    long, long_merges = _make_list(_Rows(start, many, context), long_tiles, group, window, policy.long, short.num_units)
    return SplitPlan(short, long, jnp.concatenate([short_merges, long_merges]))


def _make_list(
    rows: _Rows, num_tiles: int, group: int, window: int | None, policy: ListPolicy, first_unit: int
) -> tuple[TileList, jax.Array]:
    """The pieces of at most `num_tiles` tiles, and the merges of those that have several."""
    tokens = tokens_of(policy.block_m, group)
    row, first, size = _tiles(rows, num_tiles, tokens)
    position = rows.context[row] - rows.tokens[row] + first - rows.start[row]
    end = jnp.maximum(position + size, 0) * (size > 0)
    begin = jnp.zeros_like(end) if window is None else jnp.clip(position - window + 1, 0, end)
    length = end - begin
    step = jnp.maximum(-(-jnp.sum(length) // policy.pieces), policy.min_piece)
    pieces = jnp.maximum(-(-length // step), 1)
    piece = jnp.maximum(_round_up(-(-length // pieces), ALIGN), ALIGN)
    pieces = jnp.maximum(-(-length // piece), 1) * (size > 0)
    order = jnp.argsort(-jnp.where(size > 0, piece, -1), stable=True)
    row, first, size, position = row[order], first[order], size[order], position[order]
    begin, end, pieces, piece = begin[order], end[order], pieces[order], piece[order]

    split = pieces > 1
    units_each = policy.block_m // UNIT
    unit_end = jnp.cumsum(jnp.where(split, pieces, 0))
    unit = first_unit + (unit_end - pieces) * units_each
    last = jnp.cumsum(pieces)
    index = jnp.arange(num_tiles + policy.pieces, dtype=jnp.int32)
    tile = jnp.minimum(_search(last, index), num_tiles - 1)
    nth = index - (last[tile] - pieces[tile])
    exists = index < last[-1]
    low = begin[tile] + nth * piece[tile]
    high = jnp.minimum(low + piece[tile], end[tile])
    target = jnp.where(split[tile], unit[tile] + nth * units_each, -1)
    # Padding tokens see nothing of any row; what a kernel reads of theirs must be there all the same.
    real_row = jnp.minimum(row[tile], rows.tokens.shape[0] - 2)
    fields = [real_row, first[tile], jnp.where(exists, size[tile], 0), position[tile], low, high, target]
    items = jnp.stack([*fields, jnp.zeros_like(low)], axis=1).astype(jnp.int32)

    # More than `pieces` tiles cannot each be longer than the step, and only those are split.
    most = min(num_tiles, policy.pieces)
    nth_split = jnp.arange(most, dtype=jnp.int32)
    tile = jnp.minimum(_search(jnp.cumsum(split.astype(jnp.int32)), nth_split), num_tiles - 1)
    exists = nth_split < jnp.sum(split)
    fields = [first[tile], jnp.where(exists, size[tile], 0), unit[tile], jnp.full_like(tile, units_each), pieces[tile]]
    merges = jnp.stack([*fields, *[jnp.zeros_like(tile)] * (MERGE_FIELDS - len(fields))], axis=1).astype(jnp.int32)
    num_units = (policy.pieces + most) * units_each
    return TileList(items, policy.block_m, tokens, num_units), merges


def _tiles(rows: _Rows, num_tiles: int, tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Row, first token and number of tokens (0: no such tile) of each tile."""
    tiles_of_row = -(-rows.tokens // tokens)
    last = jnp.cumsum(tiles_of_row)
    index = jnp.arange(num_tiles, dtype=jnp.int32)
    row = jnp.minimum(_search(last, index), rows.tokens.shape[0] - 1)
    offset = (index - last[row] + tiles_of_row[row]) * tokens
    size = jnp.clip(rows.tokens[row] - offset, 0, tokens) * (index < last[-1])
    return row, rows.start[row] + offset, size


def _search(ascending: jax.Array, values: jax.Array) -> jax.Array:
    """How many of `ascending` are at most each value; without a loop, which would cut the step's CUDA graph."""
    return jnp.searchsorted(ascending, values, side="right", method="scan_unrolled").astype(jnp.int32)


def _round_up(value: jax.Array, multiple: int) -> jax.Array:
    return -(-value // multiple) * multiple
