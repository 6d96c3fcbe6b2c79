"""The public operation: documentation, checks, choice of implementation."""

import math
from functools import partial
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose
from pallas_kernels.kv_format import FLOAT_DTYPES, format_of, head_dim_of
from pallas_kernels.paged_attention.cases import SELF_CHECK_ROWS, AttentionShape, make_operands
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.triton import check_triton, make_work_list_triton, paged_attention_triton
from pallas_kernels.paged_attention.work_list import WorkList, make_tiles
from pallas_kernels.paged_attention.xla import paged_attention_xla

OP = "paged_attention"

WIDEST = 1 << 30
"""A window beyond any context; a position and it still add up within 32 bits."""


def paged_attention(
    q: jax.Array,
    pages: jax.Array,
    block_tables: jax.Array,
    query_start: jax.Array,
    context_lens: jax.Array,
    *,
    scales: jax.Array | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    tree_mask: jax.Array | None = None,
    work_list: WorkList | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of a ragged batch of new tokens over a paged KV cache that already holds their keys and values.

    PagedAttention (arXiv:2309.06180) with FlashAttention's online softmax (arXiv:2205.14135). Row b has the tokens
    ``query_start[b] .. query_start[b + 1] - 1`` of the step; they are the last of its ``context_lens[b]`` positions,
    and each sees the cached ones and the new ones up to itself. A decode, a prefill chunk, a verification and a
    scoring pass differ only in their number of new tokens.

    Args:
        q: [T, N, H], queries, float32, bfloat16 or float16.
        pages: [P, 2K, S, H], the pool: keys of KV head h in row 2h, values in row 2h + 1; query head n uses KV head
            n // (N / K). Its dtype is q's, or one of the formats of `pallas_kernels.kv_format`: int8, float8_e4m3fn,
            float8_e5m2, or uint8[P, 2K, S, H / 2] for int4. A NaN key makes NaN of the tokens that see it and of no
            others. What is in unused pages, behind the end of a row or before the window of its first new token can be
            anything, NaN included.
        block_tables: int32[B, M], page of each S positions of a row; unused entries hold any page id of the pool.
        query_start: int32[B + 1], ascending from 0; rows without tokens repeat the value. Tokens past
            ``query_start[B]`` are padding.
        context_lens: int32[B], positions of each row, the new tokens included.
        scales: float32[P, 2K, S], ``value = code * scale``; for the pools that hold codes, and only those.
        scale: factor on the logits, 1 / sqrt(H) by default.
        window: the token at position p sees positions p - window + 1 .. p, at least 1; None for all.
        softcap: ``softcap * tanh(logits / softcap)`` takes the place of the scaled logits, above 0; None for none.
        tree_mask: bool[T, Qmax]; token t sees the j-th new token of its row iff ``tree_mask[t, j]``, in place of
            causality among the new tokens. A token that sees d others of its row is at depth d of the tree: its window
            counts back over the cached positions as that of the d-th new token does without a tree, and leaves out no
            new ones. Rows of more than Qmax tokens, such as long chunks of a prompt, are no trees: what the mask says
            of them does not count.
        work_list: what `make_work_list` returned for this step, to share it between layers.
        implementation: one of `pallas_kernels.dispatch.IMPLEMENTATIONS`; by default what made the work list if there
            is one, else the best for the current device.

    Returns:
        [T, N, H] in q's dtype; padding tokens, and tokens that see nothing, give 0.

    Raises:
        ValueError: shapes or dtypes that do not fit together, scales that are missing or not wanted, a window or
            softcap out of range, a work list of another step, or an unknown implementation.
    """
    _check_operands(q, pages, block_tables, query_start, context_lens, tree_mask)
    _check_dtypes(q, pages, scales)
    _check_options(scale, window, softcap)
    window = None if window is None else min(window, WIDEST)
    if work_list is not None:
        _check_work_list(work_list, q.shape[0], window, implementation)
        if implementation is None and work_list.implementation != "triton":
            implementation = work_list.implementation
    if 0 in (q.size, block_tables.size):
        return jnp.zeros_like(q)
    options: dict[str, Any] = {
        "scales": scales,
        "scale": q.shape[-1] ** -0.5 if scale is None else float(scale),
        "window": window,
        "softcap": None if softcap is None else float(softcap),
        "tree_mask": tree_mask,
    }
    name = _choose(q, pages, options, implementation)
    operands = (q, pages, block_tables, query_start, context_lens)
    if name == "reference":
        return paged_attention_reference(*operands, **options)
    # A list made before the dtypes were known may be for a kernel that cannot do them.
    if work_list is None or _maker(work_list.implementation) != _maker(name):
        work_list = make_work_list(
            query_start,
            context_lens,
            num_tokens=q.shape[0],
            num_heads=q.shape[1],
            num_kv_heads=pages.shape[1] // 2,
            head_dim=q.shape[2],
            window=window,
            implementation=name,
        )
    options["work_list"] = work_list.plan
    if name == "xla":
        return paged_attention_xla(*operands, **options)
    return paged_attention_triton(*operands, **options, interpret=name == "triton-interpret")


def make_work_list(
    query_start: jax.Array,
    context_lens: jax.Array,
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None = None,
    whole: bool = False,
    implementation: str | None = None,
) -> WorkList:
    """How a step's work is cut up, computed once on the device and shared by all layers of the same window.

    Args:
        query_start, context_lens: as for `paged_attention`.
        num_tokens: T, static, as the following.
        num_heads, num_kv_heads, head_dim: N, K, H.
        window: of the layers.
        whole: no tile's context is cut into pieces, so that what a token sees is added up in an order that depends on
            its position alone; slow for few tokens with long contexts. For ``T <= B`` only.
        implementation: as for `paged_attention`.

    Returns:
        a pytree whose shapes depend on nothing but the static arguments and B.

    Raises:
        ValueError: shapes that do not fit together, a window below 1, or an unknown implementation.
    """
    rows = context_lens.shape[0]
    if query_start.shape != (rows + 1,) or context_lens.ndim != 1:
        raise ValueError(
            f"query_start{query_start.shape} must have one entry more than context_lens{context_lens.shape}"
        )
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}")
    _check_options(None, window, None)
    if whole and num_tokens > rows:
        raise ValueError(f"whole=True is for steps of single tokens, and {num_tokens} tokens are more than {rows} rows")
    window = None if window is None else min(window, WIDEST)
    # The pool is not known here: what the kernel cannot do with it is found out in `paged_attention`.
    check = partial(
        check_triton,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        pages_shape=(1, 2 * num_kv_heads, 16, head_dim),
        pages_dtype=jnp.dtype(jnp.bfloat16),
    )
    name = choose(OP, implementation, check=check)
    plan: Any = None
    if name == "xla":
        plan = make_tiles(query_start, context_lens, num_tokens, window)
    elif name.startswith("triton"):
        plan = make_work_list_triton(
            query_start,
            context_lens,
            num_tokens=num_tokens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window,
            whole=whole,
        )
    return WorkList(plan, name, num_tokens, window)


def _choose(q: jax.Array, pages: jax.Array, options: dict[str, Any], implementation: str | None) -> str:
    num_heads, num_kv_heads = q.shape[1], pages.shape[1] // 2
    check = partial(
        check_triton,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        pages_shape=pages.shape,
        pages_dtype=pages.dtype,
        dtype=q.dtype,
    )
    case = (str(q.dtype), str(pages.dtype), num_heads // num_kv_heads, q.shape[2], pages.shape[2])
    features = (options[field] is not None for field in ("window", "softcap", "tree_mask"))
    return choose(OP, implementation, check=check, self_check=_self_check, case=(*case, *features))


def _maker(implementation: str) -> str:
    return implementation.removesuffix("-interpret")


def _check_operands(
    q: jax.Array,
    pages: jax.Array,
    block_tables: jax.Array,
    query_start: jax.Array,
    context_lens: jax.Array,
    tree_mask: jax.Array | None,
) -> None:
    if q.ndim != 3 or pages.ndim != 4 or q.shape[-1] != head_dim_of(pages):
        raise ValueError(
            f"q{q.shape} must be [T, N, H] and pages {pages.dtype}{pages.shape} [P, 2K, S, H] with the same H "
            "(H / 2 bytes for int4)"
        )
    if pages.shape[1] < 2 or pages.shape[1] % 2 or q.shape[1] % (pages.shape[1] // 2):
        raise ValueError(f"pages{pages.shape}: axis 1 must be 2K with K dividing the {q.shape[1]} query heads")
    rows = block_tables.shape[0]
    if block_tables.ndim != 2 or query_start.shape != (rows + 1,) or context_lens.shape != (rows,):
        raise ValueError(
            f"block_tables{block_tables.shape} must be [B, M], query_start{query_start.shape} [B + 1] and "
            f"context_lens{context_lens.shape} [B]"
        )
    for name, ids in (("block_tables", block_tables), ("query_start", query_start), ("context_lens", context_lens)):
        if ids.dtype != jnp.int32:
            raise ValueError(f"{name} is {ids.dtype}; it must be int32: use .astype(jnp.int32)")
    if tree_mask is None:
        return
    if (
        tree_mask.ndim != 2
        or tree_mask.shape[0] != q.shape[0]
        or not tree_mask.shape[1]
        or tree_mask.dtype != jnp.bool_
    ):
        raise ValueError(
            f"tree_mask {tree_mask.dtype}{tree_mask.shape} must be bool [T, Qmax] with T={q.shape[0]}, Qmax >= 1"
        )


def _check_dtypes(q: jax.Array, pages: jax.Array, scales: jax.Array | None) -> None:
    if q.dtype not in FLOAT_DTYPES:
        raise ValueError(f"q is {q.dtype}; it must be one of {', '.join(map(str, FLOAT_DTYPES))}")
    kv_format = format_of(pages.dtype)
    if kv_format is None:
        if pages.dtype != q.dtype:
            raise ValueError(f"pages are {pages.dtype} but q is {q.dtype}: cast q, or keep the pool in q's dtype")
        if scales is not None:
            raise ValueError(
                f"scales{scales.shape} were given for {pages.dtype} pages, which have none: leave them out"
            )
    elif scales is None:
        raise ValueError(
            f"scales=None, but {pages.dtype} pages hold {kv_format.name} codes: give float32{pages.shape[:3]}"
        )
    elif scales.shape != pages.shape[:3] or scales.dtype != jnp.float32:
        raise ValueError(f"scales {scales.dtype}{scales.shape} must be float32{pages.shape[:3]}, one a token and head")


def _check_options(scale: float | None, window: int | None, softcap: float | None) -> None:
    if window is not None and (isinstance(window, bool) or not isinstance(window, Integral) or window < 1):
        raise ValueError(
            f"window={window!r} must be an int of at least 1 (1: a token sees itself only), or None for no window"
        )
    if softcap is not None and not (isinstance(softcap, Real) and 0 < softcap < math.inf):
        raise ValueError(f"softcap={softcap!r} must be a number above 0, or None for no soft cap")
    if scale is not None and not (isinstance(scale, Real) and math.isfinite(scale)):
        raise ValueError(f"scale={scale!r} must be a finite number fixed when tracing, or None for 1 / sqrt(H)")


def _check_work_list(work_list: WorkList, num_tokens: int, window: int | None, implementation: str | None) -> None:
    if (work_list.num_tokens, work_list.window) != (num_tokens, window):
        raise ValueError(
            f"work_list is for num_tokens={work_list.num_tokens} and window={work_list.window}, not for {num_tokens} "
            f"and {window}: make one for each window"
        )
    if implementation not in (None, "reference") and _maker(implementation) != _maker(work_list.implementation):
        raise ValueError(
            f"work_list was made for implementation={work_list.implementation!r}, not {implementation!r}: make it for "
            "the same one"
        )


def _self_check(
    implementation: str,
    dtype: str,
    pages_dtype: str,
    group: int,
    head_dim: int,
    page_size: int,
    window: bool,
    softcap: bool,
    tree: bool,
) -> jax.Array:
    """A decode, a chunk that fills a tile of the prefill kernel, and a row of several pieces; see `choose`."""
    shape = AttentionShape(
        num_heads=2 * group,
        num_kv_heads=2,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        pages_dtype=pages_dtype,
        window=50 if window else None,
        softcap=5.0 if softcap else None,
        tree=tree,
    )
    return paged_attention(**make_operands(shape, SELF_CHECK_ROWS), **shape.options, implementation=implementation)
