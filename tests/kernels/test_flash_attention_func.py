"""`flash_attn_func` has the flash-attn package's meaning, as its documentation states it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flash_attention import flash_attn_func


def dense(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keep: np.ndarray,
    scale: float,
    softcap: float = 0.0,
    slopes: np.ndarray | None = None,
) -> tuple[jax.Array, jax.Array]:
    """All logits at once; ``keep[T, S]`` as the documentation draws its masks."""
    k, v = (jnp.repeat(array, q.shape[2] // k.shape[2], axis=2) for array in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    if slopes is not None:
        i, j = np.mgrid[: keep.shape[0], : keep.shape[1]]
        scores = scores - jnp.asarray(slopes)[..., None, None] * np.abs(i + keep.shape[1] - keep.shape[0] - j)
    weights = jnp.where(keep, jnp.exp(scores), 0.0)
    total = weights.sum(-1, keepdims=True)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights / jnp.where(total > 0, total, 1.0), v)
    return out, jnp.log(total[..., 0])


def operands(num_queries: int, num_keys: int, heads: int = 6, kv_heads: int = 2) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    sizes = [(num_queries, heads), (num_keys, kv_heads), (num_keys, kv_heads)]
    return [jnp.asarray(rng.standard_normal((2, *size, 16)), jnp.float32) for size in sizes]


def matrix(text: str) -> np.ndarray:
    return np.array([[cell == "1" for cell in row.split()] for row in text.strip().splitlines()])


MASKS: dict[str, tuple[dict[str, Any], np.ndarray]] = {
    "nothing": ({}, matrix("1 1 1 1\n1 1 1 1")),
    "causal, fewer queries": ({"causal": True}, matrix("1 1 1 1 0\n1 1 1 1 1")),
    "causal, more queries": ({"causal": True}, matrix("0 0\n0 0\n0 0\n1 0\n1 1")),
    "window": ({"window_size": (1, 0)}, matrix("0 1 1 0 0\n0 0 1 1 0\n0 0 0 1 1")),
    "window to the left": ({"window_size": (1, -1)}, matrix("1 1 1\n1 1 1\n0 1 1")),
    "window to the right": ({"window_size": (-1, 1)}, matrix("1 1 0\n1 1 1\n1 1 1")),
    "causal cuts the window": ({"window_size": (1, 2), "causal": True}, matrix("1 0 0\n1 1 0\n0 1 1")),
    "window of one": ({"window_size": (0, 0)}, matrix("1 0 0\n0 1 0\n0 0 1")),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    options, keep = MASKS[name]
    q, k, v = operands(*keep.shape)
    out, lse, weights = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    want, want_lse = dense(q, k, v, keep, 0.25)
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)
    assert lse.shape == (2, 6, keep.shape[0]) and lse.dtype == jnp.float32
    assert weights is None


@pytest.mark.parametrize("per_row", [False, True])
def test_alibi_scale_and_soft_cap_with_gradients(per_row: bool) -> None:
    q, k, v = operands(9, 12)
    slopes = np.random.default_rng(1).uniform(0.1, 1.0, (2, 6) if per_row else (6,)).astype(np.float32)
    keep = np.tri(9, 12, 3, dtype=bool)

    def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return flash_attn_func(q, k, v, 0.0, 0.7, True, (-1, -1), 3.0, jnp.asarray(slopes), True)

    def theirs(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return dense(q, k, v, keep, 0.7, 3.0, slopes)[0]

    def results(function: Callable[..., jax.Array]) -> Any:
        out, pullback = jax.vjp(function, q, k, v)
        return out, *pullback(jnp.cos(out))

    for got, want in zip(
        jax.jit(results, static_argnums=0)(ours), jax.jit(results, static_argnums=0)(theirs), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_result_alone_by_default() -> None:
    q, k, v = operands(4, 4)
    np.testing.assert_allclose(flash_attn_func(q, k, v), dense(q, k, v, np.ones((4, 4), bool), 0.25)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout_p": 0.1}, NotImplementedError, r"dropout_p=0.1.*0.0"),
        ({"window_size": 5}, ValueError, r"window_size=5 must be \(left, right\)"),
        ({"window_size": (-2, 0)}, ValueError, r"window_size=\(-2, 0\).*-1"),
        ({"window_size": (1, 2, 3)}, ValueError, r"window_size=\(1, 2, 3\) must be \(left, right\)"),
        ({"softcap": -1.0}, ValueError, r"softcap=-1.0.*0.0 for no cap"),
        ({"alibi_slopes": jnp.ones(5)}, ValueError, r"alibi_slopes\(5,\) must be \(6,\) or \(2, 6\)"),
        ({"softmax_scale": float("nan")}, ValueError, r"scale=nan"),
    ],
)
def test_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flash_attn_func(*operands(4, 4), **options)
