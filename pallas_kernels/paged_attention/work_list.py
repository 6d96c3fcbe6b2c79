"""Which query tiles a step has, longest context first: computed once a step, used by every layer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

PREFILL_TILE = 16
"""Query tokens of a tile in a step that is wider than its rows: a prompt reads its pages once for this many tokens."""


class WorkList(NamedTuple):
    """Tiles of a ragged step, each up to Q consecutive tokens of one row, sorted by how far they reach, longest first.

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


def query_tile(num_tokens: int, num_rows: int) -> int:
    """Q: single tokens where a step of T tokens may be B decodes, `PREFILL_TILE` where it must hold longer rows."""
    return 1 if num_tokens <= num_rows else PREFILL_TILE


def make_work_list(query_start: jax.Array, context_lens: jax.Array, num_tokens: int) -> WorkList:
    """Builds the list on the device.

    Args:
        query_start: int32[B + 1], as in `paged_attention`.
        context_lens: int32[B].
        num_tokens: T, static.
    """
    num_rows = context_lens.shape[0]
    size = query_tile(num_tokens, num_rows)
    tiles_of_row = -(-jnp.diff(query_start) // size)
    last_tile = jnp.cumsum(tiles_of_row)
    # All tiles of a row but its last are full.
    tile = jnp.arange(num_tokens // size + (num_rows if size > 1 else 0), dtype=jnp.int32)
    rows = jnp.minimum(jnp.searchsorted(last_tile, tile, side="right"), num_rows - 1).astype(jnp.int32)
    starts = query_start[rows] + (tile - last_tile[rows] + tiles_of_row[rows]) * size
    ends = jnp.minimum(starts + size, query_start[rows + 1])
    reach = context_lens[rows] - query_start[rows + 1] + ends
    exists = tile < last_tile[-1]
    order = jnp.argsort(jnp.where(exists, -reach, 1))
    rows, starts, ends, exists = rows[order], starts[order], ends[order], exists[order]
    tokens = starts[:, None] + jnp.arange(size, dtype=jnp.int32)
    valid = (tokens < ends[:, None]) & exists[:, None]
    return WorkList(rows, jnp.minimum(tokens, num_tokens - 1), valid, last_tile[-1])
