"""The public operations: documentation, checks, choice of implementation."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.byte_pairs import needs_pairs
from pallas_kernels.dispatch import choose
from pallas_kernels.kv_format import FLOAT_DTYPES, dequantize, format_of, head_dim_of
from pallas_kernels.kv_write.reference import kv_write_reference, rope_kv_write_reference
from pallas_kernels.kv_write.triton import Span, check_kv_write, kv_write_triton, rope_kv_write_triton, rope_spans


def kv_write(
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    scales: jax.Array | None = None,
    implementation: str | None = None,
) -> Any:
    """Scatters the keys and values of a step's tokens into their pages, in place when the pool is donated.

    A pool of 8-bit or 4-bit codes gets codes and a scale per token and head, as `pallas_kernels.kv_format.quantize`
    makes them.

    Where a head's key or value of a token holds NaN or infinity, its key becomes NaN (in a quantised pool its scale)
    and its value 0. Attention weights a position that is not visible with 0 but still multiplies its value, and 0 * NaN
    would reach every row that is handed the page later; a NaN key is masked away for those rows, and makes NaN of every
    row that does see the token.

    Args:
        k, v: [T, K, H], rotated keys and values, float32, bfloat16 or float16.
        pages: [P, 2K, S, H], keys of head h in row 2h, values in row 2h + 1; a float dtype, int8, float8_e4m3fn,
            float8_e5m2, or uint8 with two int4 codes a byte, [P, 2K, S, H / 2].
        page_ids: int32[T], 0 .. P - 1, page of each token; padding tokens name page 0, the sink nobody reads, not -1.
            Beside page 0 no two tokens may have the same place. Values out of range are not looked for on the device.
        offsets: int32[T], position within the page, 0 .. S - 1.
        scales: float32[P, 2K, S], of a quantised pool.
        implementation: one of `pallas_kernels.dispatch.IMPLEMENTATIONS`; None chooses for the current device.

    Returns:
        pages with the tokens written, in the pool's dtype; for a quantised pool (pages, scales).

    Raises:
        ValueError: shapes or dtypes that do not fit together, or an unknown implementation.
    """
    tokens, heads, head_dim = _shape("k", k, "[T, K, H]", 3)
    if v.shape != k.shape or v.dtype != k.dtype:
        raise ValueError(f"k {k.dtype}{k.shape} and v {v.dtype}{v.shape} must both be [T, K, H] of one dtype")
    _check_pool(heads, head_dim, pages, scales)
    _check_places(tokens, page_ids, offsets)
    name = choose(
        "kv_write",
        implementation,
        check=partial(check_kv_write, pages, scales, (Span(0, head_dim),)),
        self_check=_check_kv_write,
        case=(str(k.dtype), str(pages.dtype), head_dim, needs_pairs(pages.shape, pages.dtype)),
    )
    if name.startswith("triton") and k.size:
        interpret = name == "triton-interpret"
        return kv_write_triton(k, v, pages, page_ids, offsets, scales=scales, interpret=interpret)
    return kv_write_reference(k, v, pages, page_ids, offsets, scales=scales)


def rope_kv_write(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    scales: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """Rotary position embedding (arXiv:2104.09864) of queries and keys, and the KV write: on a GPU one launch.

    The first R channels are rotated, in float32: channel i pairs with channel i + R / 2 (the half-split layout of
    Hugging Face checkpoints). Rotated keys are rounded to qkv's dtype and go into the pool as `kv_write` says.

    Args:
        qkv: [T, K, G + 2, H], the fused projection: of each KV head its G query rows, its key and its value.
        cos, sin: float32[T, R / 2], of each token's angles, R <= H.
        pages, page_ids, offsets, scales, implementation: as for `kv_write`.

    Returns:
        q [T, N, H] rotated, N = K G, in qkv's dtype; pages; and for a quantised pool scales.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or an unknown implementation.
    """
    tokens, heads, rows, head_dim = _shape("qkv", qkv, "[T, K, G + 2, H]", 4)
    if rows < 3:
        raise ValueError(f"qkv{qkv.shape} must be [T, K, G + 2, H] with at least one query row: G >= 1")
    half = cos.shape[-1]
    if cos.shape != (tokens, half) or sin.shape != cos.shape or not 0 < 2 * half <= head_dim:
        raise ValueError(f"cos{cos.shape} and sin{sin.shape} must be [T={tokens}, R / 2] with R in 2 .. H={head_dim}")
    if cos.dtype != jnp.float32 or sin.dtype != jnp.float32:
        raise ValueError(
            f"cos ({cos.dtype}) and sin ({sin.dtype}) must be float32: half precision misplaces far tokens"
        )
    _check_pool(heads, head_dim, pages, scales)
    _check_places(tokens, page_ids, offsets)
    name = choose(
        "rope_kv_write",
        implementation,
        check=partial(check_kv_write, pages, scales, rope_spans(head_dim, half)),
        self_check=_check_rope_kv_write,
        case=(str(qkv.dtype), str(pages.dtype), head_dim, half, rows, needs_pairs(pages.shape, pages.dtype)),
    )
    operands = (qkv, cos, sin, pages, page_ids, offsets)
    if name.startswith("triton") and qkv.size:
        return rope_kv_write_triton(*operands, scales=scales, interpret=name == "triton-interpret")
    return rope_kv_write_reference(*operands, scales=scales)


def _shape(name: str, array: jax.Array, meaning: str, rank: int) -> tuple[int, ...]:
    if array.ndim != rank or array.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name} is {array.dtype}{array.shape}; it must be {meaning} in float32, bfloat16 or float16")
    return array.shape


def _check_pool(heads: int, head_dim: int, pages: jax.Array, scales: jax.Array | None) -> None:
    kv_format = format_of(pages.dtype)
    if pages.ndim != 4 or pages.shape[1] != 2 * heads or head_dim_of(pages) != head_dim:
        raise ValueError(f"pages {pages.dtype}{pages.shape} must be [P, 2K, S, H] with K={heads} and H={head_dim}")
    if kv_format is None and scales is not None:
        raise ValueError(f"scales{scales.shape} were given for pages of {pages.dtype}, which have none")
    if kv_format is not None and (scales is None or scales.shape != pages.shape[:3] or scales.dtype != jnp.float32):
        given = None if scales is None else f"{scales.dtype}{scales.shape}"
        raise ValueError(f"scales={given} must be float32{pages.shape[:3]} for pages of {pages.dtype}")


def _check_places(tokens: int, page_ids: jax.Array, offsets: jax.Array) -> None:
    if page_ids.shape != (tokens,) or offsets.shape != (tokens,):
        raise ValueError(f"page_ids{page_ids.shape} and offsets{offsets.shape} must be ({tokens},)")
    for name, places in (("page_ids", page_ids), ("offsets", offsets)):
        if not jnp.issubdtype(places.dtype, jnp.integer):
            raise ValueError(f"{name} is {places.dtype}; it must be int32: use .astype(jnp.int32)")


def _tiny(dtype: str, pages_dtype: str, head_dim: int, rows: int) -> tuple[jax.Array, ...]:
    """Rows of 2 heads of 3 tokens, one of them with a NaN, and a pool of 4 pages for them.

    Odd multiples of 1 / 8: rotated with the factors below they are exact in every dtype, and no quotient by a scale is
    near the middle of two codes, so that implementations agree whatever they round.
    """
    values = (2 * np.random.default_rng(0).integers(-16, 16, (3, 2, rows, head_dim)) + 1) / 8
    values[1, 1, rows - 1, 0] = np.nan
    pages = jnp.zeros((4, 4, 2, head_dim // 2 if pages_dtype == "uint8" else head_dim), pages_dtype)
    return jnp.asarray(values, dtype), pages, jnp.array([3, 1, 1]), jnp.array([1, 0, 1])


def _tiny_scales(pages: jax.Array) -> jax.Array | None:
    return None if format_of(pages.dtype) is None else jnp.zeros(pages.shape[:3], jnp.float32)


def _check_kv_write(implementation: str, dtype: str, pages_dtype: str, head_dim: int, paired: bool = False) -> Any:
    values, pages, *places = _tiny(dtype, pages_dtype, head_dim, 2)
    run: Any = partial(kv_write, implementation=implementation)
    if paired and implementation.startswith("triton"):
        run = partial(kv_write_triton, paired=True, interpret=implementation != "triton")
    written = run(values[:, :, 0], values[:, :, 1], pages, *places, scales=_tiny_scales(pages))
    return dequantize(*written) if isinstance(written, tuple) else written


def _check_rope_kv_write(
    implementation: str, dtype: str, pages_dtype: str, head_dim: int, half: int, rows: int, paired: bool = False
) -> Any:
    qkv, pages, *places = _tiny(dtype, pages_dtype, head_dim, rows)
    signs = 2 * np.random.default_rng(1).integers(0, 2, (2, 3, half)) - 1
    cos, sin = jnp.asarray(0.5 * signs[0], jnp.float32), jnp.asarray(0.25 * signs[1], jnp.float32)
    run: Any = partial(rope_kv_write, implementation=implementation)
    if paired and implementation.startswith("triton"):
        run = partial(rope_kv_write_triton, paired=True, interpret=implementation != "triton")
    q, *written = run(qkv, cos, sin, pages, *places, scales=_tiny_scales(pages))
    return q, dequantize(*written) if len(written) == 2 else written[0]
