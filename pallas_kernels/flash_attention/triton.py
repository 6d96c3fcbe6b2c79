"""The forward pass as one Pallas-Triton kernel: FlashAttention-2 (arXiv:2307.08691).

A program holds a tile of queries of one head and walks over the tiles of keys that it can see: first those that a
window cuts, then those it sees whole, which need no mask, then those that the diagonal or the end of the keys cuts.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.flash_attention.blocks import Pairs, Place, Sizes, Tile, dot, mask_specs, place_of, scaled_sum, walk
from pallas_kernels.flash_attention.config import Tiles
from pallas_kernels.flash_attention.logits import LOG2_E
from pallas_kernels.flash_attention.spec import AttentionSpec, Masks, keys_of
from pallas_kernels.triton_call import triton_call

FLOOR = -1e30
"""Where running maxima start: finite, so that a row that has seen nothing yet never subtracts infinities."""


def flash_attention_triton(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    masks: Masks,
    spec: AttentionSpec,
    *,
    with_lse: bool,
    tiles: Tiles,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """The forward pass.

    Args:
        q, k, v, masks, spec: checked by `flash_attention`.
        with_lse: whether to write the log-sum-exp.
        tiles: see `config.tile_set`.
        interpret: run in Pallas' interpreter.

    Returns:
        out: [B, T, N, H] in q's dtype.
        lse: float32[B, N, T], or None.
    """
    sizes = Sizes.of(q, k)
    num_tiles = pl.cdiv(sizes.num_queries, tiles.queries)
    place = place_of(num_tiles, sizes.num_heads, last_first=True)

    def of_queries(program: jax.Array) -> tuple[Any, ...]:
        row, head, tile = place(program)
        return row, tile, head, 0

    def of_keys(program: jax.Array) -> tuple[Any, ...]:
        row, head, _ = place(program)
        return row, 0, lax.div(head, sizes.group), 0

    q_spec = pl.BlockSpec((None, tiles.queries, None, sizes.lanes), of_queries)
    kv_spec = pl.BlockSpec((None, sizes.num_keys, None, sizes.lanes), of_keys)
    lse_shape = jax.ShapeDtypeStruct((sizes.batch, sizes.num_heads, sizes.num_queries), jnp.float32)
    outputs = triton_call(
        partial(_forward_kernel, spec=spec, sizes=sizes, tiles=tiles, place=place, interpret=interpret),
        name="flash_attention_forward",
        grid=(sizes.batch * sizes.num_heads * num_tiles,),
        in_specs=[q_spec, kv_spec, kv_spec, mask_specs(masks, place, tiles.queries, None)],
        out_specs=[q_spec, pl.BlockSpec((None, None, tiles.queries), place)][: 1 + with_lse],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), lse_shape][: 1 + with_lse],
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
    )(q, k, v, masks)
    return outputs[0], outputs[1] if with_lse else None


def _forward_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    masks: Masks,
    out_ref: Any,
    lse_ref: Any = None,
    *,
    spec: AttentionSpec,
    sizes: Sizes,
    tiles: Tiles,
    place: Place,
    interpret: bool,
) -> None:
    row, head, tile = place(pl.program_id(0))
    first = tile * tiles.queries
    kv_length = sizes.num_keys if masks.kv_lengths is None else masks.kv_lengths[row]
    slope = None if masks.slopes is None else masks.slopes[row, head]
    queries = Tile(first + jnp.arange(tiles.queries), sizes.num_queries)
    q_segments = None if masks.q_segments is None else queries.load_vector(masks.q_segments)[:, None]
    q = queries.load(q_ref, sizes.head_dim)

    def visit(index: jax.Array, carry: tuple[jax.Array, ...], *, masked: bool) -> tuple[jax.Array, ...]:
        best, total, mixed = carry
        window = pl.ds(index * tiles.keys, tiles.keys)
        keys = Tile(index * tiles.keys + jnp.arange(tiles.keys), kv_length)
        kv_segments = None
        if masks.kv_segments is not None:
            kv_segments = keys.load_vector(masks.kv_segments.at[window])[None, :]
        positions = (queries.rows + sizes.offset)[:, None]
        pairs = Pairs(positions, keys.rows[None, :], kv_length, q_segments, kv_segments, slope)
        k = keys.load(k_ref.at[window, :], sizes.head_dim, whole=not masked)
        logits, factor, _ = pairs.logits(spec, dot(q, k, (1, 1), interpret=interpret))
        if masked:
            logits = jnp.where(pairs.visible(spec), logits, -jnp.inf)
        new_best = jnp.maximum(best, logits.max(1) * factor)
        weights = jnp.exp2(scaled_sum(logits, factor, -new_best[:, None], interpret=interpret))
        decay = jnp.exp2(best - new_best)
        v = keys.load(v_ref.at[window, :], sizes.head_dim, whole=not masked)
        mixed = mixed * decay[:, None] + dot(weights.astype(v.dtype), v, (1, 0), interpret=interpret)
        return new_best, total * decay + weights.sum(1), mixed

    start = first + sizes.offset
    carry = (
        jnp.full(tiles.queries, FLOOR, jnp.float32),
        jnp.zeros(tiles.queries, jnp.float32),
        jnp.zeros((tiles.queries, sizes.lanes), jnp.float32),
    )
    best, total, mixed = walk(
        keys_of(spec, start, start + tiles.queries - 1, kv_length, sizes.num_keys),
        tiles.keys,
        visit,
        carry,
        all_masked=masks.everywhere,
        masked_head=spec.left is not None,
        masked_tail=spec.right is not None or masks.kv_lengths is not None or sizes.num_keys % tiles.keys != 0,
    )
    seen = total > 0
    out = mixed / jnp.where(seen, total, 1.0)[:, None]
    queries.store(out_ref, out, sizes.head_dim)
    if lse_ref is not None:
        lse = jnp.where(seen, (best + jnp.log2(total)) / LOG2_E, -jnp.inf)
        plt.store(lse_ref, lse, mask=queries.exists)
