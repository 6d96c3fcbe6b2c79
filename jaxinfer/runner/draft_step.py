"""draft_step: a step of a draft model, which writes its own pool and draws one token more for each row."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jaxinfer.cache.paged import KVCache
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.runner.inputs import StepSpec, unpack
from jaxinfer.runner.step import make_attention
from jaxinfer.sampling.batch import NUM_FIELDS, SamplingBatch
from jaxinfer.sampling.logits import keep_candidates
from jaxinfer.sampling.noise import gumbel_noise
from jaxinfer.sampling.sampler import first_largest


class DraftState(NamedTuple):
    """What the device remembers between draft steps; donated to each.

    Attributes:
        last_tokens: int32[C], the token drawn last for each slot.
        drafted: float32[D, V], the distributions of the current drafts, as logits; V is the target's vocabulary.
    """

    last_tokens: jax.Array
    drafted: jax.Array


class DraftOutput(NamedTuple):
    """int32[R] tokens, and the successors of pool and state."""

    tokens: jax.Array
    kv: KVCache
    state: DraftState


def init_draft_state(num_slots: int, num_places: int, vocab_size: int, sharding: Sharding | None = None) -> DraftState:
    """An all-zero state of C slots and D places; `sharding`: of its arrays, None is the default device."""
    zeros = partial(jnp.zeros, device=sharding)
    return DraftState(zeros((num_slots,), jnp.int32), zeros((num_places, vocab_size), jnp.float32))


def make_draft_step(
    config: ModelConfig, params_tree: Any, spec: StepSpec, *, block_size: int, vocab_size: int
) -> Callable[..., DraftOutput]:
    """The step function of one spec: ``(leaves, kv, state, packed) -> DraftOutput``, jitted with kv and state donated.

    Args:
        config: of the draft model.
        params_tree: treedef of its parameters.
        spec: shapes; with the sampler `num_drafts` is 1, for the row of places.
        block_size: S.
        vocab_size: V of the target; ids that only the draft has are never drawn.
    """
    decoder = Decoder(config)

    def draft_step(leaves: tuple[jax.Array, ...], kv: KVCache, state: DraftState, packed: jax.Array) -> DraftOutput:
        variables = {"params": jax.tree.unflatten(params_tree, leaves)}
        step = unpack(packed, spec)
        tokens = jnp.where(step.token_slots < 0, step.tokens, state.last_tokens[jnp.maximum(step.token_slots, 0)])
        run: Any = decoder.apply
        attention = make_attention(step, spec, config, block_size)
        hidden, written = run(variables, tokens, step.positions, attention, kv.layers)
        logits = run(variables, hidden[step.logits_tokens], method=Decoder.logits)[:, :vocab_size]
        slot, drafted = step.sampling[0], state.drafted
        if spec.sampler:
            batch = SamplingBatch.unpack(step.sampling[:NUM_FIELDS])
            candidates, logits = _draw(logits, batch)
            padding = ((0, 0), (0, vocab_size - candidates.shape[1]))  # a draft with fewer ids than the target
            kept = jnp.pad(candidates, padding, constant_values=-jnp.inf)
            slot, drafted = batch.slot, drafted.at[step.sampling[NUM_FIELDS]].set(kept, mode="drop")
        drawn, _ = first_largest(logits)
        last_tokens = state.last_tokens.at[slot].set(drawn, mode="drop")
        return DraftOutput(drawn, KVCache(tuple(written)), DraftState(last_tokens, drafted))

    return draft_step


def _draw(logits: jax.Array, batch: SamplingBatch) -> tuple[jax.Array, jax.Array]:
    """The logits of what a row may draw, and scores whose largest is the draw; greedy rows' are their logits."""
    random = batch.temperature > 0
    scaled = logits / jnp.where(random, batch.temperature, 1.0)[:, None]
    candidates = keep_candidates(scaled, batch.top_k, batch.top_p, batch.min_p, random)
    noise = gumbel_noise(batch.seed_lo, batch.seed_hi, batch.child_index, batch.position, logits.shape[1])
    return candidates, jnp.where(random[:, None], candidates + noise, logits)
