"""Rejection sampling of drafted tokens (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318)."""

import jax
import jax.numpy as jnp

from jaxinfer.sampling.batch import SamplingBatch
from jaxinfer.sampling.draft_rows import DrawnDrafts
from jaxinfer.sampling.noise import uniform_noise

DRAFT_STREAM = 0x243F6A88
ACCEPT_STREAM = 0x85A308D3
"""Put over the upper half of a request's seed for randomness of other kinds than that of its draws."""


def rejection_scores(candidates: jax.Array, noise: jax.Array, batch: SamplingBatch, drawn: DrawnDrafts) -> jax.Array:
    """float32[R, V], whose largest is the token of the row's position.

    With p the target's distribution and q the one that the draft's token x was drawn with, x is taken with probability
    min(1, p(x) / q(x)), and otherwise a sample of max(0, p - q), scaled to one, in which x cannot occur: so the result
    is distributed as p, and it is x exactly when x was accepted. Rows without such a token get a sample of p.

    Args:
        candidates: float32[R, V], the target's logits, -inf what is left out.
        noise: float32[R, V], standard Gumbel.
        batch: the rows.
        drawn: their draft tokens.
    """
    token = jnp.maximum(drawn.token, 0)[:, None]
    target, draft = jax.nn.softmax(candidates, axis=1), jax.nn.softmax(drawn.logits, axis=1)
    chance = uniform_noise(batch.seed_lo, batch.seed_hi ^ jnp.uint32(ACCEPT_STREAM), batch.child_index, batch.position)
    probability = jnp.take_along_axis(target, token, axis=1)[:, 0]
    rest = jnp.maximum(target - draft, 0.0)
    # Rounded, equal distributions can leave nothing; then what was drawn is as good as anything that p allows.
    is_taken = (chance * jnp.take_along_axis(draft, token, axis=1)[:, 0] < probability) | (
        (jnp.max(rest, axis=1) == 0.0) & (probability > 0.0)
    )
    is_token = jnp.arange(candidates.shape[1]) == token
    taken = jnp.where(is_token, 0.0, -jnp.inf)
    others = jnp.where(is_token, -jnp.inf, jnp.log(rest) + noise)
    decided = jnp.where(is_taken[:, None], taken, others)
    draws = (drawn.token < 0) | (jnp.max(candidates, axis=1) == -jnp.inf)  # the latter: bans leave nothing
    return jnp.where(draws[:, None], candidates + noise, decided)
