"""How many tokens a step speculation would give, from how often its guesses are what the model says."""

import jax
import jax.numpy as jnp

MEASURED_GUESSES = 5
"""Guesses of a draft that is measured on held-out text."""


def chain_length(hits: jax.Array) -> jax.Array:
    """Tokens that a step yields, ``[...]``: the model's own, and the guesses up to the first wrong one.

    Args:
        hits: ``[..., K]``, whether guess k, from 0, is right where those before it are; a guess beyond the end of the
            text counts as wrong.
    """
    return 1.0 + jnp.sum(jnp.cumprod(hits.astype(jnp.float32), axis=-1), axis=-1)


def following(hits: jax.Array, depth: int) -> jax.Array:
    """``[..., T, depth]``: entry j at t is ``hits[..., t + j]``, False beyond the end."""
    padded = jnp.pad(hits, [(0, 0)] * (hits.ndim - 1) + [(0, depth - 1)])
    return jnp.stack([padded[..., place : place + hits.shape[-1]] for place in range(depth)], axis=-1)
