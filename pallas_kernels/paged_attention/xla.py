"""Ragged paged attention in plain XLA: tiled, online softmax, every page read once a tile.

Tiles of similar reach are taken `BLOCK` at a time and walk their pages in chunks with a dynamic trip count, so that the
work follows the contexts and not the width of the block table, and a gathered chunk stays in cache.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.work_list import WorkList

CHUNK = 64
"""Context positions gathered at a time (rounded to whole pages)."""

BLOCK = 8
"""Tiles attended together."""

MASKED = -1e30


class _Step(NamedTuple):
    """The operands that every tile shares; q is scaled, the block tables are padded to whole chunks."""

    q: jax.Array
    pages: jax.Array
    block_tables: jax.Array
    cached: jax.Array
    query_start: jax.Array
    context_lens: jax.Array
    tree_mask: jax.Array | None
    pages_per_chunk: int


def paged_attention_xla(
    q: jax.Array,
    pages: jax.Array,
    block_tables: jax.Array,
    query_start: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float,
    tree_mask: jax.Array | None,
    work_list: WorkList,
) -> jax.Array:
    """Same contract as `paged_attention`."""
    pages_per_chunk = min(max(CHUNK // pages.shape[2], 1), block_tables.shape[1])
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % pages_per_chunk)))
    cached = context_lens - jnp.diff(query_start)
    scaled = q * jnp.asarray(scale, q.dtype)
    step = _Step(scaled, pages, tables, cached, query_start, context_lens, tree_mask, pages_per_chunk)
    width = work_list.rows.shape[0]
    block = min(BLOCK, width)

    def attend_block(index: jax.Array, out: jax.Array) -> jax.Array:
        # The last block slides back over tiles that were done before; it computes the same for them again.
        first = jnp.minimum(index * block, width - block)
        rows, tokens, valid = (
            jax.lax.dynamic_slice_in_dim(field, first, block)
            for field in (work_list.rows, work_list.tokens, work_list.valid)
        )
        result = _attend_tiles(step, rows, tokens, valid)
        return out.at[jnp.where(valid, tokens, out.shape[0])].set(result.astype(out.dtype), mode="drop")

    num_blocks = (work_list.num_tiles + block - 1) // block
    return jax.lax.fori_loop(0, num_blocks, attend_block, jnp.zeros_like(q))


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
    heads, page_size, head_dim = step.pages.shape[1] // 2, step.pages.shape[2], step.pages.shape[3]
    groups = step.q.shape[1] // heads
    chunk = step.pages_per_chunk * page_size
    q = step.q[tokens].reshape(width, queries, heads, groups, head_dim).transpose(0, 2, 1, 3, 4)
    q = q.reshape(width, heads, queries * groups, head_dim)
    tables, cached = step.block_tables[rows], step.cached[rows]
    last = jnp.where(valid, cached[:, None] + tokens - step.query_start[rows][:, None], -1)  # last visible position
    reach = last if step.tree_mask is None else jnp.where(valid, step.context_lens[rows][:, None] - 1, -1)

    def attend_chunk(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        best, total, mixed = carry
        page_ids = jax.lax.dynamic_slice_in_dim(tables, index * step.pages_per_chunk, step.pages_per_chunk, axis=1)
        positions = index * chunk + jnp.arange(chunk)
        if step.tree_mask is None:
            visible = positions <= last[:, :, None]
        else:
            visible = _visible_in_tree(step.tree_mask[tokens], positions, cached, reach)
        logits = jnp.einsum("wkqh,wklh->wkql", q, _gather(step.pages, page_ids, 0), preferred_element_type=jnp.float32)
        visible = jnp.repeat(visible, groups, axis=1)[:, None]
        logits = jnp.where(visible, logits, MASKED)
        new_best = jnp.maximum(best, logits.max(-1, keepdims=True))
        weights = jnp.exp(logits - new_best)
        decay = jnp.exp(best - new_best)
        values = _gather(step.pages, page_ids, 1)
        update = jnp.einsum("wkql,wklh->wkqh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        return new_best, total * decay + weights.sum(-1, keepdims=True), mixed * decay + update

    shape = (width, heads, queries * groups)
    start = (jnp.full((*shape, 1), MASKED), jnp.zeros((*shape, 1)), jnp.zeros((*shape, head_dim)))
    _, total, mixed = jax.lax.fori_loop(0, (jnp.max(reach) + chunk) // chunk, attend_chunk, start)
    out = (mixed / total).reshape(width, heads, queries, groups, head_dim)
    return out.transpose(0, 2, 1, 3, 4).reshape(width, queries, heads * groups, head_dim)


def _visible_in_tree(tree_mask: jax.Array, positions: jax.Array, cached: jax.Array, reach: jax.Array) -> jax.Array:
    """bool[W, Q, chunk]: all cached positions, and of the new ones those that ``tree_mask[W, Q, Qmax]`` names."""
    among_new = positions[None, :] - cached[:, None]
    index = jnp.clip(among_new, 0, tree_mask.shape[-1] - 1)
    in_tree = jnp.take_along_axis(tree_mask, index[:, None, :], axis=2)
    return ((among_new < 0)[:, None, :] | in_tree) & (positions <= reach[:, :, None])


def _gather(pages: jax.Array, page_ids: jax.Array, offset: int) -> jax.Array:
    """Keys (`offset` 0) or values (1) of ``page_ids[W, C]`` as ``[W, K, C * S, H]``, laid out as the dots want them."""
    heads, head_dim = pages.shape[1] // 2, pages.shape[3]
    head_rows = 2 * jnp.arange(heads) + offset
    gathered = pages.at[page_ids[:, None, :], head_rows[None, :, None]].get(mode="promise_in_bounds")
    return gathered.reshape(page_ids.shape[0], heads, -1, head_dim)
