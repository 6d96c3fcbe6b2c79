"""The step of the deterministic mode: `forward_step` in fixed tiles."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache.paged import KVCache
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.runner.fixed_tiles import (
    FlatTokens,
    TokenTile,
    hidden_in_tiles,
    over_tiles,
    tile_logits,
    tile_normalizers,
)
from jaxinfer.runner.inputs import StepInput, StepSpec, unpack
from jaxinfer.runner.step import GREEDY_FIELDS, SAMPLER_FIELDS, PagedAttention, StepOutput, attention_over, pack_output
from jaxinfer.sampling.batch import FIELD, SamplingBatch
from jaxinfer.sampling.logits import LogitsProcessor
from jaxinfer.sampling.sampler import sample, sample_greedy
from jaxinfer.sampling.state import SamplingState
from jaxinfer.typing import Params


def make_tiled_step(
    config: ModelConfig,
    params_tree: Any,
    spec: StepSpec,
    *,
    block_size: int,
    num_logprobs: int,
    processors: tuple[LogitsProcessor, ...] = (),
) -> Callable[..., StepOutput]:
    """`make_forward_step` for a spec with a `tile`: first the hidden states of all tokens, a tile after the other, then
    the logits and the draws of the rows that need them. Both loops end with what there is, so a step's cost follows its
    tokens in steps of a tile. The arguments are the same."""
    decoder = Decoder(config)

    def tiled_step(leaves: tuple[jax.Array, ...], kv: KVCache, state: SamplingState, packed: jax.Array) -> StepOutput:
        params: Params = jax.tree.unflatten(params_tree, leaves)
        step = unpack(packed, spec)
        hidden, kv = hidden_in_tiles(
            decoder,
            params,
            _flat_tokens(step, state),
            kv,
            spec.tile,
            partial(tile_attention, config=config, block_size=block_size),
        )
        draw = partial(_draw_tile, decoder, params, spec, num_logprobs, processors, hidden, step)
        rows = step.logits_tokens.shape[0]
        fields = len(SAMPLER_FIELDS) + 2 * num_logprobs if spec.sampler else len(GREEDY_FIELDS)
        logits = jnp.zeros((rows, config.vocab_size), jnp.float32) if spec.sampler else None
        start = jnp.zeros((fields, rows), jnp.int32), logits, state
        results, logits, state = over_tiles(_num_rows(step, state, spec), spec.tile, draw, start)
        return StepOutput(results, logits, kv, state)

    return tiled_step


def tile_attention(tile: TokenTile, config: ModelConfig, block_size: int) -> PagedAttention:
    """What all layers share in their attention of one tile."""
    return attention_over(
        config,
        page_ids=tile.page_ids,
        offsets=tile.positions % block_size,
        block_tables=tile.block_tables,
        query_start=tile.query_start,
        context_lens=tile.context_lens,
        num_tokens=tile.tokens.shape[0],
        whole=True,
    )


def _flat_tokens(step: StepInput, state: SamplingState) -> FlatTokens:
    places = jnp.arange(step.tokens.shape[0], dtype=jnp.int32)
    rows = jnp.searchsorted(step.query_start[1:], places, side="right", method="compare_all").astype(jnp.int32)
    return FlatTokens(
        tokens=jnp.where(step.token_slots < 0, step.tokens, state.last_tokens[jnp.maximum(step.token_slots, 0)]),
        positions=step.positions,
        page_ids=step.page_ids,
        rows=jnp.minimum(rows, step.context_lens.shape[0] - 1),
        block_tables=step.block_tables,
        num_tokens=step.query_start[-1],
    )


def _num_rows(step: StepInput, state: SamplingState, spec: StepSpec) -> jax.Array:
    """How many logits rows are no padding; they come first."""
    used = step.sampling[FIELD["slot"]] < state.last_tokens.shape[0]
    if spec.sampler:
        used |= step.sampling[FIELD["want_logprobs"]] > 0  # rows that score have no slot
    return jnp.max(jnp.where(used, jnp.arange(1, used.shape[0] + 1, dtype=jnp.int32), 0))


def _draw_tile(
    decoder: Decoder,
    params: Params,
    spec: StepSpec,
    num_logprobs: int,
    processors: tuple[LogitsProcessor, ...],
    hidden: jax.Array,
    step: StepInput,
    first: jax.Array,
    held: tuple[jax.Array, jax.Array | None, SamplingState],
) -> tuple[jax.Array, jax.Array | None, SamplingState]:
    """Logits and draws of the tile of logits rows that begins at `first`."""
    results, all_logits, state = held
    tokens = lax.dynamic_slice_in_dim(step.logits_tokens, first, spec.tile)
    sampling = lax.dynamic_slice_in_dim(step.sampling, first, spec.tile, axis=1)
    logits = tile_logits(decoder, params, hidden[tokens])
    if not spec.sampler or all_logits is None:
        drawn, finite = sample_greedy(logits)
        state = state._replace(last_tokens=state.last_tokens.at[sampling[0]].set(drawn, mode="drop"))
        found = jnp.stack([drawn, finite.astype(jnp.int32)])
        return lax.dynamic_update_slice_in_dim(results, found, first, axis=1), None, state
    output, state = sample(
        logits,
        SamplingBatch.unpack(sampling),
        state,
        processors=processors,
        num_logprobs=num_logprobs,
        normalize=tile_normalizers,
    )
    return (
        lax.dynamic_update_slice_in_dim(results, pack_output(output), first, axis=1),
        lax.dynamic_update_slice_in_dim(all_logits, logits, first, axis=0),
        state,
    )
