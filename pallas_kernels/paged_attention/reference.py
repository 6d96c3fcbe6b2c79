"""The specification of ragged paged attention, in plain jax.numpy; slow and obvious."""

import jax
import jax.numpy as jnp


def paged_attention_reference(
    q: jax.Array,
    pages: jax.Array,
    block_tables: jax.Array,
    query_start: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float,
    tree_mask: jax.Array | None = None,
) -> jax.Array:
    """Same contract as `paged_attention`; gathers the whole context of every token."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, page_size = pages.shape[1] // 2, pages.shape[2]
    rows = jnp.searchsorted(query_start, jnp.arange(num_tokens), side="right") - 1
    owned = jnp.arange(num_tokens) < query_start[-1]
    rows = jnp.where(owned, rows, 0)
    new_index = jnp.arange(num_tokens) - query_start[rows]
    cached = context_lens[rows] - (query_start[rows + 1] - query_start[rows])

    gathered = pages[block_tables[rows]]  # [T, M, 2K, S, H]
    keys = jnp.moveaxis(gathered[:, :, 0::2], 2, 1).reshape(num_tokens, num_kv_heads, -1, head_dim)
    values = jnp.moveaxis(gathered[:, :, 1::2], 2, 1).reshape(num_tokens, num_kv_heads, -1, head_dim)

    position = jnp.arange(block_tables.shape[1] * page_size)[None, :]
    visible = position <= (cached + new_index)[:, None]
    if tree_mask is not None:
        among_new = jnp.clip(position - cached[:, None], 0, tree_mask.shape[1] - 1)
        in_tree = jnp.take_along_axis(tree_mask, among_new, axis=1)
        is_new = (position >= cached[:, None]) & (position < context_lens[rows][:, None])
        visible = (position < cached[:, None]) | (is_new & in_tree)
    visible &= owned[:, None]

    grouped = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim).astype(jnp.float32)
    logits = jnp.einsum("tkgh,tklh->tkgl", grouped, keys.astype(jnp.float32)) * scale
    logits = jnp.where(visible[:, None, None], logits, -jnp.inf)
    weights = jnp.where(visible[:, None, None], jnp.exp(logits - logits.max(-1, keepdims=True, initial=-1e30)), 0.0)
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    out = jnp.einsum("tkgl,tklh->tkgh", weights, values.astype(jnp.float32))
    return out.reshape(q.shape).astype(q.dtype)
