"""The public operation: documentation, checks, choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.work_list import WorkList, make_work_list
from pallas_kernels.paged_attention.xla import paged_attention_xla

IMPLEMENTATIONS = ("xla", "reference")


def paged_attention(
    q: jax.Array,
    pages: jax.Array,
    block_tables: jax.Array,
    query_start: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float | None = None,
    tree_mask: jax.Array | None = None,
    work_list: WorkList | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """Attention of a ragged batch of new tokens over a paged KV cache that already holds their keys and values.

    PagedAttention (arXiv:2309.06180) with FlashAttention's online softmax (arXiv:2205.14135). Row b has the tokens
    ``query_start[b] .. query_start[b + 1] - 1`` of the step; they are the last of its ``context_lens[b]`` positions,
    and each sees the cached ones and the new ones up to itself. A decode, a prefill chunk, a verification and a
    scoring pass differ only in their number of new tokens.

    Args:
        q: [T, N, H], queries, float32, bfloat16 or float16.
        pages: [P, 2K, S, H], the pool: keys of KV head h in row 2h, values in row 2h + 1. Values are finite everywhere;
            a NaN key makes NaN of the tokens that see it and of no others. Query head n uses KV head n // (N / K).
        block_tables: int32[B, M], page of each S positions of a row; unused entries hold any valid page.
        query_start: int32[B + 1], ascending; rows without tokens repeat the value. Tokens past ``query_start[B]``
            are padding.
        context_lens: int32[B], positions of each row, the new tokens included.
        scale: factor on the logits, 1 / sqrt(H) by default.
        tree_mask: bool[T, Qmax]; token t sees the j-th new token of its row iff ``tree_mask[t, j]``, in place of
            causality among the new tokens; Qmax must cover the longest row.
        work_list: what `make_work_list` returned for this step, to share it between layers.
        implementation: "xla", or "reference" (slow).

    Returns:
        [T, N, H] in q's dtype; padding tokens give 0.

    Raises:
        ValueError: shapes that do not fit together, or an unknown implementation.
    """
    _check(q, pages, block_tables, query_start, context_lens)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} must be one of {', '.join(IMPLEMENTATIONS)}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    operands = (q, pages, block_tables, query_start, context_lens)
    if implementation == "reference":
        return paged_attention_reference(*operands, scale=scale, tree_mask=tree_mask)
    if work_list is None:
        work_list = make_work_list(query_start, context_lens, q.shape[0])
    return paged_attention_xla(*operands, scale=scale, tree_mask=tree_mask, work_list=work_list)


def _check(
    q: jax.Array, pages: jax.Array, block_tables: jax.Array, query_start: jax.Array, context_lens: jax.Array
) -> None:
    if q.ndim != 3 or pages.ndim != 4 or q.shape[-1] != pages.shape[-1]:
        raise ValueError(f"q{q.shape} must be [T, N, H] and pages{pages.shape} [P, 2K, S, H] with the same H")
    if pages.shape[1] % 2 or q.shape[1] % (pages.shape[1] // 2):
        raise ValueError(f"pages{pages.shape}: axis 1 must be 2K with K dividing the {q.shape[1]} query heads")
    rows = block_tables.shape[0]
    if query_start.shape != (rows + 1,) or context_lens.shape != (rows,):
        raise ValueError(
            f"block_tables{block_tables.shape} has {rows} rows, so query_start{query_start.shape} must be "
            f"({rows + 1},) and context_lens{context_lens.shape} ({rows},)"
        )
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q has dtype {q.dtype}; it must be float32, bfloat16 or float16")
