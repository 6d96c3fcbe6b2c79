"""The public operation: documentation, checks, choice of implementation."""

import math
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Device, choose
from pallas_kernels.flash_attention.config import tile_set
from pallas_kernels.flash_attention.differentiable import attend
from pallas_kernels.flash_attention.reference import flash_attention_reference
from pallas_kernels.flash_attention.spec import AttentionSpec, Masks

Window = int | tuple[int | None, int | None]

FARTHEST = 1 << 30
"""Beyond any position; a position and it still add up within 32 bits."""


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    kv_lengths: jax.Array | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of contiguous queries over contiguous keys and values, with memory linear in their number.

    FlashAttention-2 (arXiv:2307.08691): tiles, online softmax; tiles that nothing can see are skipped. Differentiable
    in q, k and v, also through the log-sum-exp; the gradients are the same in every run. The last query stands at the
    last key: query i has position ``i + S - T``. A query that sees no key gives 0, log-sum-exp -inf, and no gradients.

    Args:
        q: [B, T, N, H], queries; float32, bfloat16 or float16, H at most 256 on a GPU.
        k, v: [B, S, K, H] in q's dtype; query head n uses KV head n // (N / K).
        causal: a query sees no key past its own position.
        window: how far a query sees. An int w >= 1: no further back than the w keys that end with its own position. A
            pair (left, right) >= 0: up to so many keys before and after its own; None for no limit.
        softcap: > 0, bounds the logits: ``softcap * tanh(logits / softcap)``, after `scale`.
        scale: factor on the products of queries and keys, 1 / sqrt(H) by default.
        segment_ids: int32[B, T], where S = T, or a pair int32[B, T], int32[B, S]; queries see keys of their own
            segment only.
        kv_lengths: int32[B], 0 .. S: how many keys of each row exist. What lies past them, NaN included, is not
            read. Positions do not depend on it.
        return_lse: also return the log-sum-exp of each query's logits.
        implementation: one of `pallas_kernels.dispatch.IMPLEMENTATIONS`; None chooses by device and case.

    Returns:
        [B, T, N, H] in q's dtype, or a pair of it and the natural log-sum-exp, float32[B, N, T].

    Raises:
        ValueError: arguments that do not fit together, naming the one and what it must be.
        NotImplementedError: ``implementation="triton"`` where the kernel cannot do what is asked.
    """
    check_operands(q, k, v)
    masks = Masks(*_segments(q, k, segment_ids), _kv_lengths(q, k, kv_lengths))
    spec = make_spec(q, causal=causal, window=window, softcap=softcap, scale=scale)
    out, lse = run(q, k, v, masks, spec, with_lse=return_lse, implementation=implementation)
    return out if lse is None else (out, lse)


def make_spec(
    q: jax.Array, *, causal: bool, window: Window | None, softcap: float | None, scale: float | None
) -> AttentionSpec:
    """The static part of a call, checked."""
    left, right = _distances(window)
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap} must be above 0, or None for no cap")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale} must be finite")
    # Causal allows nothing to the right, whatever the window says.
    return AttentionSpec(scale, None if softcap is None else float(softcap), left, 0 if causal else right)


def _distances(window: Window | None) -> tuple[int | None, int | None]:
    """How far a query sees to the left and to the right."""
    if isinstance(window, Integral) and not isinstance(window, bool):
        if window < 1:
            raise ValueError(f"window={window} must be at least 1: a query's own position counts")
        window = (int(window) - 1, None)
    sides = (None, None) if window is None else window
    if not isinstance(sides, tuple) or len(sides) != 2 or not all(_is_distance(side) for side in sides):
        raise ValueError(
            f"window={window} must be an int of at least 1, or a pair of distances from 0 up, None for no limit"
        )
    left, right = (None if side is None else min(int(side), FARTHEST) for side in sides)
    return left, right


def _is_distance(side: Any) -> bool:
    return side is None or (isinstance(side, Integral) and not isinstance(side, bool) and int(side) >= 0)


def run(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    masks: Masks,
    spec: AttentionSpec,
    *,
    with_lse: bool,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Chooses an implementation for checked arguments and runs it."""

    def check(device: Device) -> None:
        tile_set(device, q.dtype, q.shape[-1])

    case = (str(q.dtype), q.shape[-1], q.shape[2] // k.shape[2])
    name = choose("flash_attention", implementation, check=check, self_check=self_check, case=case)
    if name == "reference" or 0 in (*q.shape, *k.shape):
        out, lse = flash_attention_reference(q, k, v, masks, spec)
        return out, lse if with_lse else None
    return attend(name, spec, q, k, v, masks, with_lse=with_lse)


def self_check(implementation: str, dtype: str, head_dim: int, group: int) -> Any:
    """Forward and backward results on a tiny input that takes every road: whole and cut tiles, window, soft cap."""
    rows, num_queries, num_keys = 2, 150, 278
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, grad = (
        jax.random.normal(key, (rows, length, heads, head_dim), dtype)
        for key, length, heads in zip(
            keys, (num_queries, num_keys, num_keys, num_queries), (2 * group, 2, 2, 2 * group), strict=True
        )
    )
    lengths = jnp.array([num_keys, num_keys - 20], jnp.int32)

    def attend_all(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        common: dict[str, Any] = {"implementation": implementation, "return_lse": True}
        causal = flash_attention(q, k, v, causal=True, kv_lengths=lengths, **common)
        return causal, flash_attention(q, k, v, window=(130, 9), softcap=20.0, **common)

    results, pullback = jax.vjp(attend_all, q, k, v)
    return results, pullback(tuple((grad, lse) for _, lse in results))


def check_operands(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """Shapes and dtypes; raises ValueError."""
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q{q.shape} must be [B, T, N, H] and k{k.shape} [B, S, K, H] with the same B and H")
    if v.shape != k.shape:
        raise ValueError(f"v{v.shape} must have the shape of k{k.shape}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"k{k.shape} has {k.shape[2]} heads, which must divide the {q.shape[2]} heads of q{q.shape}")
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"q has dtype {q.dtype}; it must be float32, bfloat16 or float16")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"k has dtype {k.dtype} and v {v.dtype}; both must be q's, {q.dtype}: cast them")


def _segments(
    q: jax.Array, k: jax.Array, segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None
) -> tuple[jax.Array | None, jax.Array | None]:
    if segment_ids is None:
        return None, None
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    of_queries, of_keys = (jnp.asarray(ids) for ids in pair)
    if of_queries.shape != q.shape[:2] or of_keys.shape != k.shape[:2]:
        raise ValueError(
            f"segment_ids{of_queries.shape}, {of_keys.shape} must be [B, T] and [B, S], {q.shape[:2]} and "
            f"{k.shape[:2]}; give a pair where T and S differ"
        )
    for array in (of_queries, of_keys):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"segment_ids has dtype {array.dtype}; it must be an integer type")
    return of_queries.astype(jnp.int32), of_keys.astype(jnp.int32)


def _kv_lengths(q: jax.Array, k: jax.Array, kv_lengths: jax.Array | None) -> jax.Array | None:
    if kv_lengths is None:
        return None
    kv_lengths = jnp.asarray(kv_lengths)
    if kv_lengths.shape != q.shape[:1] or not jnp.issubdtype(kv_lengths.dtype, jnp.integer):
        raise ValueError(f"kv_lengths is {kv_lengths.dtype}{kv_lengths.shape}; it must be int32 of shape {q.shape[:1]}")
    # A length beyond the keys would let a kernel read past the row.
    return jnp.clip(kv_lengths, 0, k.shape[1]).astype(jnp.int32)
