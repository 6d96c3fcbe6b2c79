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


def query_tile(num_tokens: int, num_rows: int) -> int:
    """Q: single tokens where a step of T tokens may be B decodes, `PREFILL_TILE` where it must hold longer rows."""
    return 1 if num_tokens <= num_rows else PREFILL_TILE


def make_tiles(query_start: jax.Array, context_lens: jax.Array, num_tokens: int, window: int | None = None) -> Tiles:
    """Builds the list on the device.

    Args:
        query_start: int32[B + 1], as in `paged_attention`.
        context_lens: int32[B].
        num_tokens: T, static.
        window: as in `paged_attention`.
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
    seen = context_lens[rows] - query_start[rows + 1] + ends
    if window is not None:
        seen = jnp.minimum(seen, window - 1 + ends - starts)
    exists = tile < last_tile[-1]
    order = jnp.argsort(jnp.where(exists, -seen, 1))
    rows, starts, ends, exists = rows[order], starts[order], ends[order], exists[order]
    tokens = starts[:, None] + jnp.arange(size, dtype=jnp.int32)
    valid = (tokens < ends[:, None]) & exists[:, None]
    return Tiles(rows, jnp.minimum(tokens, num_tokens - 1), valid, last_tile[-1])
