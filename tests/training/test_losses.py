"""Losses against their definitions, computed in float64 by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.training import losses

RNG = np.random.default_rng(0)
STUDENT, TEACHER = 3 * RNG.standard_normal((2, 5, 11))


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits.astype(np.float64))
    return powers / powers.sum(-1, keepdims=True)


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (p * np.log(p / q)).sum(-1)


def merged(probabilities: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Probabilities of these tokens, and what is left."""
    chosen = np.take_along_axis(probabilities, ids, -1)
    return np.concatenate([chosen, 1 - chosen.sum(-1, keepdims=True)], -1)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergences(temperature: float) -> None:
    student, teacher = jnp.float32(STUDENT / temperature), jnp.float32(TEACHER / temperature)
    q, p = softmax(STUDENT / temperature), softmax(TEACHER / temperature)
    np.testing.assert_allclose(losses.forward_kl(student, teacher), kl(p, q), rtol=1e-5)
    np.testing.assert_allclose(losses.reverse_kl(student, teacher), kl(q, p), rtol=1e-5)


def test_top_tokens_and_the_rest_are_a_distribution() -> None:
    k = 3
    ids, logprobs, tail = losses.top_logprobs(jnp.float32(TEACHER), k)
    p, q = softmax(TEACHER), softmax(STUDENT)
    expected = np.argsort(-p, -1)[:, :k]
    assert np.array_equal(ids, expected)
    np.testing.assert_allclose(np.exp(np.c_[logprobs, tail]), merged(p, expected), rtol=1e-5)
    coarse_p, coarse_q = merged(p, expected), merged(q, expected)
    forward = losses.forward_kl_top(jnp.float32(STUDENT), ids, logprobs, tail)
    reverse = losses.reverse_kl_top(jnp.float32(STUDENT), ids, logprobs, tail)
    np.testing.assert_allclose(forward, kl(coarse_p, coarse_q), rtol=1e-5)
    np.testing.assert_allclose(reverse, kl(coarse_q, coarse_p), rtol=1e-5)
    assert (np.asarray(forward) < kl(p, q)).all()


def test_all_but_one_token_leave_nothing_out() -> None:
    """With a single other token, merging the others merges nothing."""
    top = losses.top_logprobs(jnp.float32(TEACHER), 10)
    found = losses.forward_kl_top(jnp.float32(STUDENT), *top)
    np.testing.assert_allclose(found, kl(softmax(TEACHER), softmax(STUDENT)), rtol=1e-5)


def test_slopes_towards_the_tail_are_those_of_its_share() -> None:
    """d KL / d logit_j = q_j - (p_j, or the tail's p shared out as q shares its tail out)."""
    ids, logprobs, tail = losses.top_logprobs(jnp.float32(TEACHER), 4)
    slopes = jax.jit(jax.grad(lambda x: losses.forward_kl_top(x, ids, logprobs, tail).sum()))(jnp.float32(STUDENT))
    p, q = softmax(TEACHER), softmax(STUDENT)
    is_top = np.zeros(p.shape, bool)
    np.put_along_axis(is_top, np.asarray(ids), True, -1)
    left_p = np.where(is_top, 0, p).sum(-1, keepdims=True)
    left_q = np.where(is_top, 0, q).sum(-1, keepdims=True)
    np.testing.assert_allclose(slopes, q - np.where(is_top, p, left_p * q / left_q), atol=1e-6)


def test_a_certain_teacher_gives_no_nan() -> None:
    """Probability 1 on a token: its tail's is 0 in float32."""
    sure = jnp.float32([[200.0, 0.0, 0.0, 0.0]])
    student = jnp.float32([[1.0, 2.0, 0.0, -1.0]])
    top = jax.jit(losses.top_logprobs, static_argnums=1)(sure, 2)
    for loss in (losses.forward_kl_top, losses.reverse_kl_top):
        value, slope = jax.jit(jax.value_and_grad(lambda x, loss=loss: loss(x, *top).sum()))(student)
        assert np.isfinite(value) and np.isfinite(slope).all()
    forward = losses.forward_kl_top(student, *top)
    np.testing.assert_allclose(forward, -np.log(softmax(np.asarray(student))[:, 0]), rtol=1e-5)


def test_cross_entropy() -> None:
    targets = np.array([3, 0, 10, 7, 7])
    expected = -np.log(softmax(STUDENT)[np.arange(5), targets])
    np.testing.assert_allclose(losses.cross_entropy(jnp.float32(STUDENT), jnp.array(targets)), expected, rtol=1e-5)


def test_hidden_states_of_one_size_and_of_two() -> None:
    rng = np.random.default_rng(1)
    mine, theirs, wide = rng.standard_normal((4, 6)), rng.standard_normal((4, 6)), rng.standard_normal((4, 9))
    projection = rng.standard_normal((9, 6))

    def expected(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return 1 - (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)

    same = losses.hidden_loss(jnp.float32(mine), jnp.float32(7 * theirs))
    np.testing.assert_allclose(same, expected(mine, theirs), rtol=1e-4)
    np.testing.assert_allclose(
        losses.hidden_loss(jnp.float32(mine), jnp.float32(wide), jnp.float32(projection)),
        expected(mine @ projection.T, wide),
        rtol=1e-4,
    )
    with pytest.raises(ValueError, match=r"need a projection of shape \(9, 6\)"):
        losses.hidden_loss(jnp.float32(mine), jnp.float32(wide))
    with pytest.raises(ValueError, match=r"projection has shape \(6, 9\); these hidden states need \(9, 6\)"):
        losses.hidden_loss(jnp.float32(mine), jnp.float32(wide), jnp.float32(projection.T))


def test_smooth_l1_has_two_branches() -> None:
    found = losses.smooth_l1(jnp.float32([[0.5, -2.0, 1.0, 0.0]]))
    np.testing.assert_allclose(found, [(0.125 + 1.5 + 0.5 + 0.0) / 4])
