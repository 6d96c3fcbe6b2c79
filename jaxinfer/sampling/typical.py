"""Typical acceptance of guessed tokens: LOSSY (arXiv:2401.10774, section 2.3.2; arXiv:2202.00666)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.config import TypicalAcceptance

ONE_TOKEN = 1e4
"""What a token more on a path counts against its log-probability."""


class GuessedRows(NamedTuple):
    """The tree that logits rows are the nodes of.

    Attributes:
        parent: int32[R], the row whose token the row's own follows; -1 for rows that are behind no guess.
        token: int32[R], the guess that the row is behind of.
    """

    parent: jax.Array
    token: jax.Array


def typical_tokens(
    tokens: jax.Array,
    candidates: jax.Array,
    random: jax.Array,
    guessed: GuessedRows,
    rule: TypicalAcceptance,
    depth: int,
) -> jax.Array:
    """int32[R]: where guesses that follow a row are typical of what the model would say there, one of them instead of
    what was drawn: the one that the longest path of typical guesses begins with, of equals the likeliest.

    With p the distribution of the row that it follows and H its entropy in nats, a guess x is typical when
    ``p(x) > min(threshold, alpha * exp(-H))``.

    Args:
        tokens: int32[R], what was drawn.
        candidates: float32[R, V], logits that it was drawn from, -inf what is left out.
        random: bool[R], rows that draw at random; others stay as they are.
        guessed: the tree.
        rule: the numbers.
        depth: guesses that follow one another, at most.
    """
    rows = jnp.arange(len(tokens))
    shares = jax.nn.softmax(candidates, axis=1)
    entropy = -jnp.sum(jnp.where(shares > 0, shares * jnp.log(shares), 0.0), axis=1)
    bound = jnp.minimum(rule.posterior_threshold, rule.posterior_alpha * jnp.exp(-entropy))
    above = jnp.maximum(guessed.parent, 0)
    share = shares[above, guessed.token]
    holds = (guessed.parent >= 0) & random[above] & (share > bound[above])
    gain = ONE_TOKEN + jnp.log(jnp.where(holds, share, 1.0))
    below = jnp.where(holds, above, len(tokens))  # nowhere
    value = best = gain
    for _ in range(depth):
        best = jnp.zeros_like(gain).at[below].max(value, mode="drop")
        value = gain + best
    is_best = holds & (gain + best >= best[above])
    chosen = jnp.full_like(rows, len(tokens)).at[jnp.where(is_best, above, len(tokens))].min(rows, mode="drop")
    return jnp.where(chosen < len(tokens), guessed.token.at[chosen].get(mode="clip"), tokens)
