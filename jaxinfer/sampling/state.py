"""SamplingState: what the device remembers of each running request between steps."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

IN_PROMPT = 1 << 30
"""The bit of a count that says that the id occurs in the prompt; the bits below count how often it was drawn."""


COUNTS_A_CALL = 32
"""Tokens that `count_tokens` counts at once."""


class SamplingState(NamedTuple):
    """Per-slot state of the C slots. It is donated to every step and every upload, which return its successor.

    Attributes:
        last_tokens: int32[C], the token drawn last.
        counts: int32[C, V], times drawn, plus IN_PROMPT when the id occurs in the prompt. Only kept for requests that
            need it.
        bias: float32[C, V], added to the logits; -inf bans. Only meaningful where a row sets `use_bias`.
    """

    last_tokens: jax.Array
    counts: jax.Array
    bias: jax.Array


def init_state(num_slots: int, vocab_size: int, sharding: Sharding | None = None) -> SamplingState:
    """An all-zero state of `state_bytes` bytes; `sharding`: of its arrays, None is the default device."""
    zeros = partial(jnp.zeros, device=sharding)
    return SamplingState(
        last_tokens=zeros((num_slots,), jnp.int32),
        counts=zeros((num_slots, vocab_size), jnp.int32),
        bias=zeros((num_slots, vocab_size), jnp.float32),
    )


def state_bytes(num_slots: int, vocab_size: int) -> int:
    """Device memory of a SamplingState."""
    return 4 * num_slots * (2 * vocab_size + 1)


@partial(jax.jit, donate_argnames="state")
def count_tokens(state: SamplingState, slots: jax.Array, token_ids: jax.Array) -> SamplingState:
    """Counts tokens that became certain after they had been guessed: one of `token_ids` in each of `slots`,
    int32[COUNTS_A_CALL] both; slot C for nothing."""
    return state._replace(counts=state.counts.at[slots, token_ids].add(1, mode="drop"))


@partial(jax.jit, donate_argnames="state")
def upload_bias(state: SamplingState, slot: jax.Array, row: jax.Array) -> SamplingState:
    """Replaces the bias of `slot` (int32 scalar) by `row`, float32[V]."""
    return state._replace(bias=state.bias.at[slot].set(row, mode="drop"))


@partial(jax.jit, donate_argnames="state")
def upload_counts(state: SamplingState, slot: jax.Array, row: jax.Array) -> SamplingState:
    """Replaces the counts of `slot` (int32 scalar) by `row`, int32[V]."""
    return state._replace(counts=state.counts.at[slot].set(row, mode="drop"))


def record_tokens(state: SamplingState, slot: jax.Array, tokens: jax.Array, counted: jax.Array) -> SamplingState:
    """Notes the drawn tokens.

    Args:
        state: the state before the step.
        slot: int32[R], C for rows that write nothing.
        tokens: int32[R], the drawn ids.
        counted: bool[R], the row's slot keeps counts.
    """
    counted_slot = jnp.where(counted, slot, state.counts.shape[0])
    return state._replace(
        last_tokens=state.last_tokens.at[slot].set(tokens, mode="drop"),
        counts=state.counts.at[counted_slot, tokens].add(1, mode="drop"),
    )
