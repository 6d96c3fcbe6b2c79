"""The specification of ragged paged attention, in plain jax.numpy; slow and obvious."""

import jax
import jax.numpy as jnp

from pallas_kernels.kv_format import dequantize


def paged_attention_reference(
    q: jax.Array,
    pages: jax.Array,
    block_tables: jax.Array,
    query_start: jax.Array,
    context_lens: jax.Array,
    *,
    scales: jax.Array | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    tree_mask: jax.Array | None = None,
) -> jax.Array:
    """Same contract as `paged_attention`, in float32; gathers the whole context of every token."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = pages.shape[1] // 2
    rows, visible = _visible(
        block_tables.shape[1] * pages.shape[2], num_tokens, query_start, context_lens, window, tree_mask
    )
    tables = block_tables[rows]
    stored = dequantize(pages[tables], None if scales is None else scales[tables])  # [T, M, 2K, S, H]
    stored = jnp.moveaxis(stored, 2, 1).reshape(num_tokens, num_kv_heads, 2, -1, head_dim)  # [T, K, 2, L, H]
    # A weight of 0 does not remove a value that is NaN, and what nobody may see can be anything.
    keys, values = stored[:, :, 0], jnp.where(visible[:, None, :, None], stored[:, :, 1], 0.0)

    grouped = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim).astype(jnp.float32)
    logits = jnp.einsum("tkgh,tklh->tkgl", grouped, keys, precision="highest") * scale
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    visible = visible[:, None, None, :]
    best = jnp.where(visible, logits, -jnp.inf).max(-1, keepdims=True, initial=-1e30)
    weights = jnp.where(visible, jnp.exp(logits - best), 0.0)
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    out = jnp.einsum("tkgl,tklh->tkgh", weights, values, precision="highest")
    return out.reshape(q.shape).astype(q.dtype)


def _visible(
    length: int,
    num_tokens: int,
    query_start: jax.Array,
    context_lens: jax.Array,
    window: int | None,
    tree_mask: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The row of each token, int32[T], and which of `length` positions it sees, bool[T, L]."""
    token = jnp.arange(num_tokens)
    owned = token < query_start[-1]
    rows = jnp.where(owned, jnp.searchsorted(query_start, token, side="right") - 1, 0)
    new = query_start[rows + 1] - query_start[rows]
    cached = context_lens[rows] - new
    among_new = jnp.arange(length)[None, :] - cached[:, None]  # < 0: cached
    if tree_mask is None:
        index = token - query_start[rows]
        visible = among_new <= index[:, None]
        in_window = True if window is None else among_new > (index - window)[:, None]
    else:
        exists = tree_mask & (jnp.arange(tree_mask.shape[1]) < new[:, None])
        named = jnp.take_along_axis(exists, jnp.clip(among_new, 0, exists.shape[1] - 1), axis=1)
        visible = (among_new < 0) | (named & (among_new < exists.shape[1]))
        # The tokens that a token of a tree sees are the path to it: their number says how deep it is.
        depth = jnp.maximum(exists.sum(axis=1) - 1, 0)
        in_window = True if window is None else (among_new >= 0) | (among_new > (depth - window)[:, None])
        index = token - query_start[rows]
        is_tree = (new <= tree_mask.shape[1])[:, None]
        visible = jnp.where(is_tree, visible, among_new <= index[:, None])
        if window is not None:
            in_window = jnp.where(is_tree, in_window, among_new > (index - window)[:, None])
    return rows, visible & in_window & owned[:, None]
