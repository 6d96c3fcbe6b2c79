"""Fixed tiles: the forward pass some tokens at a time, always in the same shapes, whoever else is in the batch.

What a product, a reduction or an attention rounds to depends on its shapes, which decide how the sums are cut up. Here
every token is computed in a tile of as many rows, sees its context as one row of its own in pieces that begin at fixed
positions, and each tile runs the same compiled loop body. So a token's numbers depend on its own sequence only: not on
the batch, the chunk it comes in, what was cached, nor whether an engine generates or a training step scores.

(XLA's CPU backend, float32: with the weights on the left, as steps of few tokens have them, a product's rows are other
bits for every number of rows from 1 to 64 that was tried; with the weights on the right only one row alone differs. At
one shape a row's place and its neighbours never mattered, in float32 and bfloat16.)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache.paged import KVCache
from jaxinfer.models.attention import AttentionFn
from jaxinfer.models.decoder import Decoder
from jaxinfer.typing import Params
from pallas_kernels.paged_attention import CHUNK

TILE_TOKENS = {"cpu": 32}
GPU_TILE_TOKENS = 128
"""Tokens of a tile: enough that a full one is computed at the speed of a large step, few enough that one token does
not take much longer than its weights take to read."""


def tile_tokens(platform: str) -> int:
    """Tokens of a tile on this platform ("cpu", "gpu", ...)."""
    return TILE_TOKENS.get(platform, GPU_TILE_TOKENS)


class FlatTokens(NamedTuple):
    """Tokens of several sequences end to end, each behind those it sees; T is a multiple of the tile.

    Attributes:
        tokens: int32[T].
        positions: int32[T], place in the token's own sequence.
        page_ids: int32[T], page that takes the token's key and value; 0, the sink, for padding.
        rows: int32[T], whose block table is the token's.
        block_tables: int32[B, M].
        num_tokens: int32[], how many tokens there are; they come first.
    """

    tokens: jax.Array
    positions: jax.Array
    page_ids: jax.Array
    rows: jax.Array
    block_tables: jax.Array
    num_tokens: jax.Array


class TokenTile(NamedTuple):
    """A tile of `FlatTokens` as a step of as many rows of one token, with the fields of `paged_attention`."""

    tokens: jax.Array
    positions: jax.Array
    page_ids: jax.Array
    block_tables: jax.Array
    query_start: jax.Array
    context_lens: jax.Array


def over_tiles(count: jax.Array, tile: int, body: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
    """``carry = body(first, carry)`` for ``first`` = 0, tile, ... below `count`.

    The number of turns is not known when this is compiled, so that XLA compiles the body by itself, the same for all.
    """
    count = lax.optimization_barrier(count)
    return lax.fori_loop(0, (count + tile - 1) // tile, lambda index, held: body(index * tile, held), carry)


def hidden_in_tiles(
    decoder: Decoder,
    params: Params,
    flat: FlatTokens,
    kv: KVCache,
    tile: int,
    attention: Callable[[TokenTile], AttentionFn[Any]],
) -> tuple[jax.Array, KVCache]:
    """Hidden states after the last norm, ``[T, D]``, 0 for padding, and the pool with the new keys and values.

    Args:
        decoder: applies `params`.
        params: the decoder's.
        flat: the tokens.
        kv: the pool; it has the keys and values of what comes before the first token of each sequence.
        tile: tokens computed at a time.
        attention: of one tile.
    """
    # An attention piece is as long in a narrow table as in a wide one.
    pages = -(-CHUNK // kv.layers[0].pages.shape[2])
    tables = jnp.pad(flat.block_tables, ((0, 0), (0, max(0, pages - flat.block_tables.shape[1]))))
    run: Any = decoder.apply

    def compute(first: jax.Array, held: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
        hidden, kv = held
        tokens, positions, page_ids, rows = (
            lax.dynamic_slice_in_dim(field, first, tile)
            for field in (flat.tokens, flat.positions, flat.page_ids, flat.rows)
        )
        number = jnp.minimum(flat.num_tokens - first, tile)
        place = jnp.arange(tile + 1, dtype=jnp.int32)
        step = TokenTile(
            tokens=tokens,
            positions=positions,
            page_ids=page_ids,
            block_tables=tables[rows],
            query_start=jnp.minimum(place, number),
            context_lens=jnp.where(place[:-1] < number, positions + 1, 0),
        )
        step = lax.optimization_barrier(step)
        x, written = run({"params": params}, step.tokens, step.positions, attention(step), kv.layers)
        x = lax.optimization_barrier(x)
        return lax.dynamic_update_slice_in_dim(hidden, x, first, axis=0), KVCache(tuple(written))

    embedded: Any = jax.eval_shape(
        lambda: run({"params": params}, flat.tokens, flat.positions, method=Decoder.embedded)
    )
    hidden = jnp.zeros(embedded.shape, embedded.dtype)
    return over_tiles(flat.num_tokens, tile, compute, (hidden, kv))


def tile_logits(decoder: Decoder, params: Params, hidden: jax.Array) -> jax.Array:
    """Logits float32[R, V] of one tile of rows ``hidden[R, D]``; to be called in a body of `over_tiles`."""
    run: Any = decoder.apply
    logits: jax.Array = run({"params": params}, lax.optimization_barrier(hidden), method=Decoder.logits)
    return lax.optimization_barrier(logits)


def tile_normalizers(logits: jax.Array) -> jax.Array:
    """float32[R], the log of the sum of the exponentials of each row of ``logits[R, V]``; likewise in a body."""
    return lax.optimization_barrier(jax.nn.logsumexp(lax.optimization_barrier(logits), axis=1))
