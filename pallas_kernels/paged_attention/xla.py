"""Ragged paged attention in plain XLA: tiled, online softmax, every page read once a tile.

Tiles that see a similar number of positions are taken some at a time and walk their pages in chunks with a dynamic
trip count, so that the work follows the contexts (or the window) and not the width of the block table, and a gathered
chunk stays in cache.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kv_format import dequantize
from pallas_kernels.paged_attention.work_list import Tiles

CHUNK = 64
"""Context positions gathered at a time (rounded to whole pages)."""

DECODE_BLOCK = 16
PREFILL_BLOCK = 8
"""Tiles attended together, of one token or of several: what is gathered for them should stay in cache, and the shortest
of them waits for the longest."""

MASKED = -1e30

NEVER = 2**30
"""A position beyond any context, far enough from overflow."""


class _Step(NamedTuple):
    """The operands that every tile shares; q has the dtype of the dots, the block tables are padded to whole chunks."""

    q: jax.Array
    pages: jax.Array
    scales: jax.Array | None
    block_tables: jax.Array
    cached: jax.Array
    query_start: jax.Array
    tree_mask: jax.Array | None
    window: int | None
    softcap: float | None
    scale: float
    pages_per_chunk: int


class _Sight(NamedTuple):
    """What the Q tokens of W tiles see.

    Attributes:
        first: int32[W, Q], the first position in a token's window; None without a window.
        last: int32[W, Q], the last position it may see, -1 where there is no token.
        cached: int32[W].
        in_tree: bool[W, Q, Qmax], which new tokens it sees of those up to `last`; all in rows of more than Qmax. None
            where there are no trees.
    """

    first: jax.Array | None
    last: jax.Array
    cached: jax.Array
    in_tree: jax.Array | None

    def sees(self, positions: jax.Array) -> jax.Array:
        """bool[W, Q, L] of ``positions[1 or W, L]``."""
        visible = positions[:, None] <= self.last[:, :, None]
        if self.first is not None:
            visible &= positions[:, None] >= self.first[:, :, None]
        if self.in_tree is None:
            return visible
        among_new = positions - self.cached[:, None]
        index = jnp.clip(among_new, 0, self.in_tree.shape[-1] - 1)
        named = jnp.take_along_axis(self.in_tree, index[:, None, :], axis=2)
        return visible & ((among_new < 0)[:, None, :] | named)

    def needs(self, positions: jax.Array) -> jax.Array:
        """bool[W, L]: whether a token of the tile may see the position, so that its value is there."""
        needed = positions <= self.last.max(1, keepdims=True)
        return needed if self.first is None else needed & (positions >= self.first.min(1, keepdims=True))


def paged_attention_xla(
    q: jax.Array,
    pages: jax.Array,
    block_tables: jax.Array,
    query_start: jax.Array,
    context_lens: jax.Array,
    *,
    scales: jax.Array | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    tree_mask: jax.Array | None,
    work_list: tuple[Tiles, ...],
) -> jax.Array:
    """Same contract as `paged_attention`."""
    pages_per_chunk = min(max(CHUNK // pages.shape[2], 1), block_tables.shape[1])
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % pages_per_chunk)))
    dtype = q.dtype if scales is None else jnp.float32
    step = _Step(
        q=q.astype(dtype),
        pages=pages,
        scales=scales,
        block_tables=tables,
        cached=context_lens - jnp.diff(query_start),
        query_start=query_start,
        tree_mask=tree_mask,
        window=window,
        softcap=softcap,
        scale=scale,
        pages_per_chunk=pages_per_chunk,
    )
    out = jnp.zeros_like(q)
    for tiles in work_list:
        out = _attend(step, tiles, out)
    return out


def _attend(step: _Step, tiles: Tiles, out: jax.Array) -> jax.Array:
    """``out[T, N, H]`` with the attention of the tiles' tokens in it."""
    width, size = tiles.tokens.shape
    block = min(DECODE_BLOCK if size == 1 else PREFILL_BLOCK, width)

    def attend_block(index: jax.Array, out: jax.Array) -> jax.Array:
        # The last block slides back over tiles that were done before; it computes the same for them again.
        first = jnp.minimum(index * block, width - block)
        rows, tokens, valid = (
            jax.lax.dynamic_slice_in_dim(field, first, block) for field in (tiles.rows, tiles.tokens, tiles.valid)
        )
        result = _attend_tiles(step, rows, tokens, valid)
        return out.at[jnp.where(valid, tokens, out.shape[0])].set(result.astype(out.dtype), mode="drop")

    return jax.lax.fori_loop(0, (tiles.num_tiles + block - 1) // block, attend_block, out)


def _attend_tiles(step: _Step, rows: jax.Array, tokens: jax.Array, valid: jax.Array) -> jax.Array:
    """Online softmax over the chunks of W tiles' contexts.

    Args:
        step: the shared operands.
        rows: int32[W].
        tokens, valid: [W, Q].

    Returns:
        float32[W, Q, N, H].
    """
    width, queries = tokens.shape
    heads, head_dim = step.pages.shape[1] // 2, step.q.shape[2]
    groups = step.q.shape[1] // heads
    q = step.q[tokens].reshape(width, queries, heads, groups, head_dim).transpose(0, 2, 1, 3, 4)
    q = q.reshape(width, heads, queries * groups, head_dim)
    sight = _sight(step, rows, tokens, valid)
    tables, chunk = step.block_tables[rows], step.pages_per_chunk * step.pages.shape[2]
    begin, count = _chunks(sight, chunk)

    def attend_chunk(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        best, total, mixed = carry
        page_ids, positions = _locate(tables, begin, index, step.pages_per_chunk, chunk)
        visible = jnp.repeat(sight.sees(positions), groups, axis=1)[:, None]
        keys, values = _gather(step, page_ids, sight.needs(positions), sight.last.max(1) >= 0)
        logits = _dot("wkqh,wklh->wkql", q, keys) * step.scale
        if step.softcap is not None:
            logits = step.softcap * jnp.tanh(logits / step.softcap)
        logits = jnp.where(visible, logits, MASKED)
        new_best = jnp.maximum(best, logits.max(-1, keepdims=True))
        weights = jnp.where(visible, jnp.exp(logits - new_best), 0.0)
        decay = jnp.exp(best - new_best)
        total = total * decay + weights.sum(-1, keepdims=True)
        update = _dot("wkql,wklh->wkqh", weights.astype(values.dtype), values)
        return new_best, total, mixed * decay + update

    shape = (width, heads, queries * groups)
    start = (jnp.full((*shape, 1), MASKED), jnp.zeros((*shape, 1)), jnp.zeros((*shape, head_dim)))
    _, total, mixed = jax.lax.fori_loop(0, count, attend_chunk, start)
    out = (mixed / jnp.maximum(total, 1e-30)).reshape(width, heads, queries, groups, head_dim)
    return out.transpose(0, 2, 1, 3, 4).reshape(width, queries, heads * groups, head_dim)


def _sight(step: _Step, rows: jax.Array, tokens: jax.Array, valid: jax.Array) -> _Sight:
    starts, cached = step.query_start[rows], step.cached[rows]
    index = tokens - starts[:, None]
    new = (step.query_start[rows + 1] - starts)[:, None]
    if step.tree_mask is None:
        in_tree, depth, last, is_long = None, index, index, jnp.bool_(True)
    else:
        in_tree = step.tree_mask[tokens] & (jnp.arange(step.tree_mask.shape[1]) < new[:, :, None])
        is_long = new > step.tree_mask.shape[1]
        depth = jnp.where(is_long, index, jnp.maximum(in_tree.sum(-1) - 1, 0))
        last = jnp.where(is_long, index, new - 1)
        in_tree |= is_long[:, :, None]
    last = jnp.where(valid, cached[:, None] + last, -1)
    if step.window is None:
        return _Sight(None, last, cached, in_tree)
    first = depth - step.window + 1
    if in_tree is not None:
        first = jnp.where(is_long, first, jnp.minimum(first, 0))  # a tree's window is one over the cached positions
    return _Sight(jnp.where(valid, cached[:, None] + first, NEVER), last, cached, in_tree)


def _chunks(sight: _Sight, chunk: int) -> tuple[jax.Array | None, jax.Array]:
    """The chunk where each tile begins (None for 0), and for how many chunks the longest goes on."""
    last = sight.last.max(1) // chunk
    if sight.first is None:
        return None, last.max() + 1
    begin = jnp.maximum(sight.first.min(1), 0) // chunk
    return begin, (last - begin).max() + 1


def _locate(
    tables: jax.Array, begin: jax.Array | None, index: jax.Array, pages_per_chunk: int, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """Page ids ``[W, C]`` of each tile's index-th chunk, and its positions ``[1 or W, L]``."""
    if begin is None:
        page_ids = jax.lax.dynamic_slice_in_dim(tables, index * pages_per_chunk, pages_per_chunk, axis=1)
        return page_ids, index * chunk + jnp.arange(chunk)[None]
    chunks = (begin + index)[:, None]
    columns = jnp.minimum(chunks * pages_per_chunk + jnp.arange(pages_per_chunk), tables.shape[1] - 1)
    return jnp.take_along_axis(tables, columns, axis=1), chunks * chunk + jnp.arange(chunk)


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """In float32 also where a GPU would round float32 operands to fewer bits."""
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32, precision="highest")


def _gather(step: _Step, page_ids: jax.Array, needed: jax.Array, exists: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values of ``page_ids[W, C]``, both ``[W, K, C * S, H]``, laid out as the dots want them.

    A weight of 0 does not remove a value that is NaN, and what no token may see can be anything: values of positions
    that are not ``needed[1 or W, C * S]`` are 0, except in tiles of which nothing ``exists[W]``.
    """
    width, heads, size = page_ids.shape[0], step.pages.shape[1] // 2, step.pages.shape[2]
    shape = (width, heads, needed.shape[1], step.q.shape[2])
    needed = jnp.broadcast_to(needed, (width, needed.shape[1]))
    rows = page_ids[:, None, :] * (2 * heads) + (2 * jnp.arange(heads))[None, :, None]
    if step.scales is not None:
        keys, values = (_dequantized(step.pages, step.scales, rows + offset).reshape(shape) for offset in (0, 1))
        return keys, jnp.where(needed[:, None, :, None], values, 0)
    # A head's page is one long row: XLA's CPU backend copies rows of that length in vectors, but not shorter ones.
    pool = step.pages.reshape(-1, size * shape[3])

    def taken() -> tuple[jax.Array, jax.Array]:
        return pool.at[rows].get(mode="promise_in_bounds"), pool.at[rows + 1].get(mode="promise_in_bounds")

    def cleared() -> tuple[jax.Array, jax.Array]:
        keys, values = taken()
        # Computed where they are used, element by element, the flags would take longer than all the rest.
        flags = jax.lax.optimization_barrier(jnp.repeat(needed.reshape(width, 1, -1, size), shape[3], axis=3))
        return keys, jnp.where(flags, values, 0)

    def taken_where_all_are_needed() -> tuple[jax.Array, jax.Array]:
        # Besides saving the mask, this keeps XLA from fusing the gathers with a reshape, which would undo the vectors.
        return jax.lax.cond(jnp.all(needed | ~exists[:, None]), taken, cleared)

    keys, values = jax.lax.platform_dependent(cpu=taken_where_all_are_needed, default=cleared)
    return keys.reshape(shape), values.reshape(shape)


def _dequantized(pages: jax.Array, scales: jax.Array, rows: jax.Array) -> jax.Array:
    """float32[W, K, C, S, H] of ``rows[W, K, C]`` of the pool, seen as ``[P * 2K, S, H]``."""
    # XLA's CPU backend would cast the whole pool before it gathers from it: float8, which it cannot gather, to float16,
    # and bytes to what they are cast to afterwards. The barriers keep the first cast in the loop and the second behind
    # the gather.
    bits, rows = jax.lax.optimization_barrier((pages, rows))
    bits, scales = (
        array.reshape(-1, *array.shape[2:]) for array in (jax.lax.bitcast_convert_type(bits, jnp.uint8), scales)
    )
    taken = jax.lax.optimization_barrier(bits.at[rows].get(mode="promise_in_bounds"))
    codes = jax.lax.bitcast_convert_type(taken, pages.dtype)
    return dequantize(codes, scales.at[rows].get(mode="promise_in_bounds"))
