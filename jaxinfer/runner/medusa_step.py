"""medusa_step: the best guesses of a model's Medusa heads, from features that its steps have left in the pool."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.models.decoder import Decoder
from jaxinfer.models.medusa import MedusaConfig, MedusaHeads
from jaxinfer.sampling.best_rows import best_of_rows
from jaxinfer.sampling.split_logits import gather_logits
from jaxinfer.sharding.shards import Shards


def make_medusa_step(
    shards: Shards, heads: MedusaConfig, heads_tree: Any, token_tree: Any, num_candidates: int
) -> Callable[..., jax.Array]:
    """The function ``(heads_leaves, token_leaves, features, places) -> int32[2, B, K, C]``.

    Of each of B tokens and each of K heads the C likeliest ids, best first, the lower id first among equals, and their
    log-probabilities as bits of float32.

    Args:
        shards: how the model that the heads belong to lies on devices. Each device computes all heads, and where they
            share the model's output matrix the columns of its part.
        heads: of the heads.
        heads_tree: treedef of their parameters.
        token_tree: treedef of a device's part of `ModelRunner.token_params`.
        num_candidates: C, at most the model's vocabulary.
    """

    decoder, axis = Decoder(shards.split.part, sum_over=shards.sum_over), shards.sum_over

    def medusa_step(
        heads_leaves: tuple[jax.Array, ...],
        token_leaves: tuple[jax.Array, ...],
        features: jax.Array,
        places: jax.Array,
    ) -> jax.Array:
        """`features`: [P, 1, S, D] of the pool; `places`: int32[2, B], page and offset of each token."""
        hidden = features.at[places[0], 0, places[1]].get(mode="promise_in_bounds")
        variables = {"params": jax.tree.unflatten(heads_tree, heads_leaves)}
        guesses: Any = MedusaHeads(heads).apply(variables, hidden)
        rows: Any = jnp.concatenate(guesses)
        if not heads.own_heads:
            output = {"params": jax.tree.unflatten(token_tree, token_leaves)}
            rows = decoder.apply(output, rows, method=Decoder.logits)
            rows = rows if axis is None else gather_logits(rows, axis, shards.split.model.vocab_size)
        logits = rows.astype(jnp.float32)
        best, ids = best_of_rows(logits, num_candidates)
        logprobs = best - jax.nn.logsumexp(logits, axis=1, keepdims=True)
        # Neither rounding nor what is no number must make a node likelier than the one before it.
        logprobs = jnp.where(jnp.isnan(logprobs), -jnp.inf, jnp.minimum(logprobs, 0.0))
        packed = jnp.stack([ids, lax.bitcast_convert_type(logprobs, jnp.int32)])
        by_head = packed.reshape(2, heads.num_heads, hidden.shape[0], num_candidates)
        return jnp.swapaxes(by_head, 1, 2)

    return medusa_step
