"""The kernels' results in float64 on the host, in plain loops over rows and heads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "uint8": 7.0}
"""The largest code of a pool's dtype; uint8 holds two int4."""


@dataclass(frozen=True)
class Masking:
    """Which positions a query sees, and what happens to its logits, as in `paged_attention` and `flash_attention`."""

    scale: float
    window: int | None = None
    softcap: float | None = None


def softmax_weights(q: np.ndarray, keys: np.ndarray, visible: np.ndarray, masking: Masking) -> tuple[np.ndarray, ...]:
    """Of ``q[C, H]`` and ``keys[L, H]`` with ``visible[C, L]``.

    Returns:
        weights [C, L], log-sum-exp [C] (-inf where nothing is visible), and the factor by which the soft cap changes
        the gradient of each logit [C, L].
    """
    logits = q @ keys.T * masking.scale
    slope = np.ones_like(logits)
    if masking.softcap is not None:
        squashed = np.tanh(logits / masking.softcap)
        logits, slope = masking.softcap * squashed, 1.0 - squashed**2
    logits = np.where(visible, logits, -np.inf)
    best = np.max(logits, axis=-1, keepdims=True, initial=-np.inf)
    best = np.where(np.isneginf(best), 0.0, best)
    weights = np.where(visible, np.exp(logits - best), 0.0)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total[:, 0]) + best[:, 0]
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0), lse, slope


def causal(num_queries: int, num_keys: int, window: int | None) -> np.ndarray:
    """bool[C, L]: the last query sits at the last key; each sees up to itself, `window` positions of it."""
    position = num_keys - num_queries + np.arange(num_queries)[:, None]
    keys = np.arange(num_keys)[None, :]
    visible = keys <= position
    return visible if window is None else visible & (keys > position - window)


def paged_attention(
    q: np.ndarray,
    contexts: list[np.ndarray],
    query_start: np.ndarray,
    masking: Masking,
    tree_mask: np.ndarray | None = None,
) -> np.ndarray:
    """``q[T, N, H]``; `contexts` has ``[2, K, L, H]``, keys and values, of each row."""
    out = np.zeros_like(q)
    for row, (keys, values) in enumerate(contexts):
        first, last = query_start[row], query_start[row + 1]
        new, length = last - first, keys.shape[1]
        visible = causal(new, length, masking.window)
        if tree_mask is not None:
            visible = tree_visible(tree_mask[first:last, :new], length, masking.window)
        group = q.shape[1] // keys.shape[0]
        for head in range(q.shape[1]):
            weights = softmax_weights(q[first:last, head], keys[head // group], visible, masking)[0]
            out[first:last, head] = weights @ values[head // group]
    return out


def tree_visible(among_new: np.ndarray, length: int, window: int | None) -> np.ndarray:
    """bool[C, L]: the cached positions in the window of the token's depth, and the new ones that the mask names."""
    new = among_new.shape[0]
    cached = length - new
    visible = np.ones((new, length), bool)
    visible[:, cached:] = among_new
    if window is not None:
        position = cached + among_new.sum(-1) - 1
        visible[:, :cached] = np.arange(cached)[None, :] > position[:, None] - window
    return visible


def dequantized(codes: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    """float64[..., H] of a pool's ``codes[..., H]`` (int4: uint8[..., H / 2])."""
    if codes.dtype == np.uint8:
        nibbles = np.stack([codes & 0xF, codes >> 4], axis=-1).astype(np.int64)
        codes = (nibbles - 16 * (nibbles > 7)).reshape(*codes.shape[:-1], -1)
    values = codes.astype(np.float64)
    return values if scales is None else values * scales[..., None]


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """RoPE of ``x[T, ..., H]`` by ``cos[T, R / 2]``: channel i of the first R pairs with i + R / 2."""
    half = cos.shape[-1]
    shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (half,)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


@dataclass(frozen=True)
class FlashResult:
    """Output, log-sum-exp [B, N, T], and gradients of ``sum(out * g)``."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, visible: np.ndarray, masking: Masking
) -> FlashResult:
    """``q[B, T, N, H]``, ``k[B, S, K, H]``, ``visible[B, T, S]``; g is the gradient of the output."""
    batch, length, heads, _ = q.shape
    group = heads // k.shape[2]
    out, dq, dk, dv = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    lse = np.zeros((batch, heads, length))
    for b in range(batch):
        for n in range(heads):
            kv = n // group
            queries, keys, values, grad = q[b, :, n], k[b, :, kv], v[b, :, kv], g[b, :, n]
            weights, lse[b, n], slope = softmax_weights(queries, keys, visible[b], masking)
            out[b, :, n] = weights @ values
            dv[b, :, kv] += weights.T @ grad
            d_weights = grad @ values.T
            d_logits = weights * (d_weights - np.sum(weights * d_weights, axis=-1, keepdims=True)) * slope
            dq[b, :, n] = d_logits @ keys * masking.scale
            dk[b, :, kv] += d_logits.T @ queries * masking.scale
    return FlashResult(out, lse, dq, dk, dv)
