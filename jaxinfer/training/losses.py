"""Distillation losses, one number a token, in nats.

Distributions come as logits, divided by the temperature beforehand, or, for a teacher that is not in memory, as its k
most probable tokens and the probability of all the others together. With the latter both sides are compared as
distributions over k + 1 outcomes: those tokens, and "another one". This is a divergence of its own: never below 0, 0
where the distributions agree in those outcomes, and never above the divergence over the whole vocabulary (merging
outcomes cannot raise it). It says how much probability the tail has, and nothing of how it is shared out there; cutting
the tail off and renormalising would teach the student that the tail is impossible.
"""

import jax
import jax.numpy as jnp

MASKED = -1e30
"""A logit of probability 0 whose gradients are 0, where -inf gives NaN."""


def forward_kl(student: jax.Array, teacher: jax.Array) -> jax.Array:
    """``KL(teacher || student)``, the teacher's mean of ``log p - log q``: float32[...] of logits [..., V].

    Its gradients with respect to the student are those of cross-entropy with the teacher's probabilities as targets
    (arXiv:1503.02531). It is large where the student finds improbable what the teacher may say.
    """
    return _kl(jax.nn.log_softmax(teacher), jax.nn.log_softmax(student))


def reverse_kl(student: jax.Array, teacher: jax.Array) -> jax.Array:
    """``KL(student || teacher)``: float32[...] of logits [..., V]. Large where the student says what the teacher would
    not; a small student keeps to a part of what the teacher says (arXiv:2306.08543)."""
    return _kl(jax.nn.log_softmax(student), jax.nn.log_softmax(teacher))


def forward_kl_top(student: jax.Array, ids: jax.Array, logprobs: jax.Array, tail: jax.Array) -> jax.Array:
    """`forward_kl` over the teacher's k most probable tokens and one outcome for all the others.

    Args:
        student: logits [..., V], divided by the temperature.
        ids: int32[..., k], those tokens, each once, k below V.
        logprobs: float32[..., k], the teacher's for them, at the same temperature.
        tail: float32[...], log of the probability that the teacher gives all the others together.

    Returns:
        float32[...].
    """
    return _kl(_joined(logprobs, tail), _outcomes(student, ids))


def reverse_kl_top(student: jax.Array, ids: jax.Array, logprobs: jax.Array, tail: jax.Array) -> jax.Array:
    """`reverse_kl` over those outcomes; arguments and result as for `forward_kl_top`."""
    return _kl(_outcomes(student, ids), _joined(logprobs, tail))


def cross_entropy(student: jax.Array, targets: jax.Array) -> jax.Array:
    """``-log q(target)``: float32[...] of logits [..., V] and int32[...]."""
    chosen = jnp.take_along_axis(student, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(student, axis=-1) - chosen


def hidden_loss(student: jax.Array, teacher: jax.Array, projection: jax.Array | None = None) -> jax.Array:
    """Half the mean squared difference of hidden states, each divided by its root mean square: float32[...].

    That is one less the cosine between them: 0 where they point the same way, 2 where opposite ways.

    Args:
        student: [..., D].
        teacher: [..., E].
        projection: [E, D], what the student's states are multiplied by first; None where D = E.

    Raises:
        ValueError: the sizes differ and there is no projection, or it is of another shape.
    """
    wanted = teacher.shape[-1], student.shape[-1]
    if projection is None and wanted[0] != wanted[1]:
        raise ValueError(f"hidden states of {wanted[1]} and {wanted[0]} channels need a projection of shape {wanted}")
    if projection is not None:
        if projection.shape != wanted:
            raise ValueError(f"projection has shape {projection.shape}; these hidden states need {wanted}")
        student = student @ projection.T
    return 0.5 * jnp.mean((_unit(student) - _unit(teacher)) ** 2, axis=-1)


def smooth_l1(difference: jax.Array) -> jax.Array:
    """The Huber loss with a threshold of 1, mean over the last axis: ``d^2 / 2`` up to 1, ``|d| - 1/2`` beyond."""
    size = jnp.abs(difference.astype(jnp.float32))
    return jnp.mean(jnp.where(size < 1.0, 0.5 * size**2, size - 0.5), axis=-1)


def top_logprobs(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `forward_kl_top` takes of a teacher: ids int32[..., k], their log-probabilities float32[..., k], and the log
    of the others' probability float32[...], of logits [..., V]. The most probable token comes first."""
    values, ids = jax.lax.top_k(logits, k)
    everything = jax.nn.logsumexp(logits, axis=-1)
    return ids, values - everything[..., None], _tail(logits, ids) - everything


def _kl(p: jax.Array, q: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1)


def _outcomes(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Log-probabilities [..., k + 1] of these tokens, and of all the others together."""
    chosen = jnp.take_along_axis(logits, ids, axis=-1)
    everything = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return _joined(chosen - everything, _tail(logits, ids) - everything[..., 0])


def _tail(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Log of the sum of exp over the tokens that are not among `ids`: no difference of nearly equal numbers."""
    others = jnp.put_along_axis(logits, ids, MASKED, axis=-1, inplace=False)
    return jax.nn.logsumexp(others, axis=-1)


def _joined(logprobs: jax.Array, tail: jax.Array) -> jax.Array:
    return jnp.concatenate([logprobs, tail[..., None]], axis=-1)


def _unit(states: jax.Array) -> jax.Array:
    states = states.astype(jnp.float32)
    return states * jax.lax.rsqrt(jnp.mean(states**2, axis=-1, keepdims=True) + 1e-12)
