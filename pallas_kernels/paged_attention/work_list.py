"""What is computed once a step and shared by its layers: for the XLA implementation, the tiles of query tokens."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PREFILL_TILE = 16
"""Query tokens of a tile in a step that is wider than its rows: a prompt reads its pages once for this many tokens."""


@partial(jax.tree_util.register_dataclass, data_fields=["plan"], meta_fields=["implementation", "num_tokens", "window"])
@dataclass(frozen=True)
class WorkList:
    """What `make_work_list` returns: a pytree to hand to `paged_attention`.

    Attributes:
        plan: arrays whose meaning is the implementation's own.
        implementation: that made it.
        num_tokens: T of the step it is for.
        window: of the layers it is for.
    """

    plan: Any
    implementation: str
    num_tokens: int
    window: int | None


class Tiles(NamedTuple):
    """Tiles of a ragged step, each up to Q consecutive tokens of one row, sorted by how much they see, most first.

    Attributes:
        rows: int32[W], the row of each tile.
        tokens: int32[W, Q], indices of its tokens in the step, clamped to T - 1.
        valid: bool[W, Q], which of them exist.
        num_tiles: int32[], how many tiles count; they come first.
    """

    rows: jax.Array
    tokens: jax.Array
    valid: jax.Array
    num_tiles: jax.Array


def make_tiles(
    query_start: jax.Array, context_lens: jax.Array, num_tokens: int, window: int | None = None
) -> tuple[Tiles, ...]:
    """Builds the lists on the device: one of single tokens where a step of T tokens may be B decodes; where it may hold
    longer rows, one of the rows with a single token and one of the longer rows.

    Args:
        query_start: int32[B + 1], as in `paged_attention`.
        context_lens: int32[B].
        num_tokens: T, static.
        window: as in `paged_attention`.
    """
    num_new, num_rows = jnp.diff(query_start), context_lens.shape[0]
    listed = partial(_tiles, query_start, context_lens, num_tokens, window)
    if num_tokens <= num_rows:
        return (listed(1, num_new, num_tokens),)
    # A decode that took a whole tile would cost as much as that many tokens.
    single = listed(1, jnp.where(num_new == 1, 1, 0), num_rows)
    longer = jnp.where(num_new == 1, 0, -(-num_new // PREFILL_TILE))
    return single, listed(PREFILL_TILE, longer, num_tokens // PREFILL_TILE + num_rows)


def _tiles(
    query_start: jax.Array,
    context_lens: jax.Array,
    num_tokens: int,
    window: int | None,
    size: int,
    tiles_of_row: jax.Array,
    width: int,
) -> Tiles:
    """W = `width` tiles of Q = `size` tokens, of which ``tiles_of_row[B]`` exist."""
    last_tile = jnp.cumsum(tiles_of_row)
    # All tiles of a row but its last are full.
    tile = jnp.arange(width, dtype=jnp.int32)
    rows = jnp.minimum(jnp.searchsorted(last_tile, tile, side="right"), context_lens.shape[0] - 1).astype(jnp.int32)
    starts = query_start[rows] + (tile - last_tile[rows] + tiles_of_row[rows]) * size
    ends = jnp.minimum(starts + size, query_start[rows + 1])
    seen = context_lens[rows] - query_start[rows + 1] + ends
    if window is not None:
        seen = jnp.minimum(seen, window - 1 + ends - starts)
    exists = tile < last_tile[-1]
    order = jnp.argsort(jnp.where(exists, -seen, 1))
    rows, starts, ends, exists = rows[order], starts[order], ends[order], exists[order]
    tokens = starts[:, None] + jnp.arange(size, dtype=jnp.int32)
    valid = (tokens < ends[:, None]) & exists[:, None]
    return Tiles(rows, jnp.minimum(tokens, num_tokens - 1), valid, last_tile[-1])
