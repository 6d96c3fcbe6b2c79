"""Log-probabilities of given tokens by the engine's own arithmetic, bit for bit, and differentiable."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache.paged import KVCache, LayerCache
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.runner.fixed_tiles import (
    FlatTokens,
    hidden_in_tiles,
    over_tiles,
    tile_logits,
    tile_normalizers,
    tile_tokens,
)
from jaxinfer.runner.tiled_step import tile_attention
from jaxinfer.sampling.logits import scaled_rows
from jaxinfer.sampling.sampler import compute_logprobs
from jaxinfer.typing import Params

PAGE = 16
"""Positions of a page of the cache that is made here; a page's size changes no number."""


def tiled_logprobs(params: Params, ids: jax.Array, config: ModelConfig, temperature: float) -> jax.Array:
    """``float32[B, T - 1]``, see `jaxinfer.training.token_logprobs`: those of an engine in the deterministic mode.

    It runs the engine's tiles over a cache of its own, which holds the keys and values of all of `ids`.
    """
    tile = tile_tokens(jax.default_backend())
    batch, length = ids.shape[0], ids.shape[1] - 1
    decoder = Decoder(config)
    flat = _flat_tokens(ids[:, :-1], tile)
    hidden, _ = hidden_in_tiles(
        decoder,
        params,
        flat,
        _cache(params, config, flat),
        tile,
        partial(tile_attention, config=config, block_size=PAGE),
    )
    targets = jnp.zeros((hidden.shape[0],), jnp.int32).at[: batch * length].set(ids[:, 1:].reshape(-1))

    def score(first: jax.Array, found: jax.Array) -> jax.Array:
        rows, chosen = (lax.dynamic_slice_in_dim(array, first, tile) for array in (hidden, targets))
        logits = tile_logits(decoder, params, rows)
        is_real = flat.num_tokens > first  # always, which XLA does not know: branches are compiled as in the sampler
        factor = jnp.where(is_real, jnp.full((tile,), 1 / temperature, jnp.float32), 1.0)
        logprobs = lax.cond(
            is_real,
            lambda: compute_logprobs(scaled_rows(logits, factor), chosen, 0, tile_normalizers).target_logprobs,
            lambda: jnp.zeros((tile,), jnp.float32),
        )
        return lax.dynamic_update_slice_in_dim(found, logprobs, first, axis=0)

    found: jax.Array = over_tiles(flat.num_tokens, tile, score, jnp.zeros(targets.shape, jnp.float32))
    return found[: batch * length].reshape(batch, length)


def _flat_tokens(ids: jax.Array, tile: int) -> FlatTokens:
    """The rows of ``ids[B, T]`` one after the other, each with pages of its own."""
    batch, length = ids.shape
    pages = -(-length // PAGE)
    tables = 1 + jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)
    row = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), length)
    position = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)
    padding = (0, -batch * length % tile)
    # Ids are not negative, which XLA does not know: otherwise it would take the loop over the tiles apart.
    count = batch * length - jnp.any(ids < 0)
    fields = (ids.reshape(-1).astype(jnp.int32), position, tables[row, position // PAGE], row)
    tokens, position, pages_of, row = (jnp.pad(field, padding) for field in fields)
    return FlatTokens(tokens, position, pages_of, row, tables, count.astype(jnp.int32))


def _cache(params: Params, config: ModelConfig, flat: FlatTokens) -> KVCache:
    """An empty cache in the activations' dtype."""
    run: Any = Decoder(config).apply
    embedded = jax.eval_shape(partial(run, method=Decoder.embedded), {"params": params}, flat.tokens, flat.positions)
    shape = (1 + flat.block_tables.size, 2 * config.num_key_value_heads, PAGE, config.head_dim)
    return KVCache(tuple(LayerCache(jnp.zeros(shape, embedded.dtype)) for _ in range(config.num_hidden_layers)))
