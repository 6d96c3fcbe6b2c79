"""The backward pass as two Pallas-Triton kernels: one for dq, one for dk and dv (FlashAttention-2, arXiv:2307.08691).

Both compute the attention weights again from the log-sum-exp. Each program owns the tile of gradients that it writes,
and a KV head's program walks over all its query heads, so nothing is summed across programs: the result is the same in
every run. The second kernel holds its tiles as keys by queries, so that no weights are transposed.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.flash_attention.blocks import Pairs, Place, Sizes, Tile, dot, mask_specs, place_of, scaled_sum, walk
from pallas_kernels.flash_attention.config import Tiles
from pallas_kernels.flash_attention.logits import LOG2_E
from pallas_kernels.flash_attention.spec import AttentionSpec, Masks, keys_of, queries_of
from pallas_kernels.triton_call import triton_call


def query_gradient_triton(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    masks: Masks,
    lse: jax.Array,
    delta: jax.Array,
    grad: jax.Array,
    spec: AttentionSpec,
    *,
    tiles: Tiles,
    interpret: bool = False,
) -> jax.Array:
    """dq, ``[B, T, N, H]``.

    Args:
        q, k, v, masks, spec: of the forward pass.
        lse: float32[B, N, T], its log-sum-exp.
        delta: float32[B, N, T], what the softmax takes off each logit's gradient.
        grad: [B, T, N, H], of the output.
        tiles: see `config.tile_set`.
        interpret: run in Pallas' interpreter.
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
    row_spec = pl.BlockSpec((None, None, tiles.queries), place)
    dq = triton_call(
        partial(_query_kernel, spec=spec, sizes=sizes, tiles=tiles, place=place, interpret=interpret),
        name="flash_attention_dq",
        grid=(sizes.batch * sizes.num_heads * num_tiles,),
        in_specs=[q_spec, kv_spec, kv_spec, mask_specs(masks, place, tiles.queries, None), row_spec, row_spec, q_spec],
        out_specs=q_spec,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
    )(q, k, v, masks, lse, delta, grad)
    return dq


def key_value_gradients_triton(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    masks: Masks,
    lse: jax.Array,
    delta: jax.Array,
    grad: jax.Array,
    spec: AttentionSpec,
    *,
    tiles: Tiles,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """dk and dv, ``[B, S, K, H]``; arguments as of `query_gradient_triton`."""
    sizes = Sizes.of(q, k)
    num_tiles = pl.cdiv(sizes.num_keys, tiles.keys)
    place = place_of(num_tiles, sizes.num_kv_heads, last_first=False)

    def of_queries(program: jax.Array) -> tuple[Any, ...]:
        row, head, _ = place(program)
        return row, 0, head, 0

    def of_keys(program: jax.Array) -> tuple[Any, ...]:
        row, head, tile = place(program)
        return row, tile, head, 0

    def of_rows(program: jax.Array) -> tuple[Any, ...]:
        row, head, _ = place(program)
        return row, head, 0

    q_spec = pl.BlockSpec((None, sizes.num_queries, sizes.group, sizes.lanes), of_queries)
    kv_spec = pl.BlockSpec((None, tiles.keys, None, sizes.lanes), of_keys)
    row_spec = pl.BlockSpec((None, sizes.group, sizes.num_queries), of_rows)
    dk, dv = triton_call(
        partial(_key_value_kernel, spec=spec, sizes=sizes, tiles=tiles, place=place, interpret=interpret),
        name="flash_attention_dkv",
        grid=(sizes.batch * sizes.num_kv_heads * num_tiles,),
        in_specs=[q_spec, kv_spec, kv_spec, mask_specs(masks, place, None, tiles.keys), row_spec, row_spec, q_spec],
        out_specs=[kv_spec, kv_spec],
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
    )(q, k, v, masks, lse, delta, grad)
    return dk, dv


def _query_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    masks: Masks,
    lse_ref: Any,
    delta_ref: Any,
    grad_ref: Any,
    dq_ref: Any,
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
    q, grad = queries.load(q_ref, sizes.head_dim), queries.load(grad_ref, sizes.head_dim)
    lse, delta = queries.load_vector(lse_ref)[:, None], queries.load_vector(delta_ref)[:, None]

    def visit(index: jax.Array, dq: jax.Array, *, masked: bool) -> jax.Array:
        window = pl.ds(index * tiles.keys, tiles.keys)
        keys = Tile(index * tiles.keys + jnp.arange(tiles.keys), kv_length)
        kv_segments = None
        if masks.kv_segments is not None:
            kv_segments = keys.load_vector(masks.kv_segments.at[window])[None, :]
        positions = (queries.rows + sizes.offset)[:, None]
        pairs = Pairs(positions, keys.rows[None, :], kv_length, q_segments, kv_segments, slope)
        k = keys.load(k_ref.at[window, :], sizes.head_dim, whole=not masked)
        v = keys.load(v_ref.at[window, :], sizes.head_dim, whole=not masked)
        weights, cap_slope = _weights(
            pairs, spec, dot(q, k, (1, 1), interpret=interpret), lse, masked=masked, interpret=interpret
        )
        d_logits = weights * (dot(grad, v, (1, 1), interpret=interpret) - delta)
        if cap_slope is not None:
            d_logits = d_logits * cap_slope
        return dq + dot(d_logits.astype(k.dtype), k, (1, 0), interpret=interpret)

    start = first + sizes.offset
    dq = walk(
        keys_of(spec, start, start + tiles.queries - 1, kv_length, sizes.num_keys),
        tiles.keys,
        visit,
        jnp.zeros((tiles.queries, sizes.lanes), jnp.float32),
        all_masked=masks.everywhere,
        masked_head=spec.left is not None,
        masked_tail=spec.right is not None or masks.kv_lengths is not None or sizes.num_keys % tiles.keys != 0,
    )
    queries.store(dq_ref, dq * spec.scale, sizes.head_dim)


def _key_value_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    masks: Masks,
    lse_ref: Any,
    delta_ref: Any,
    grad_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
    *,
    spec: AttentionSpec,
    sizes: Sizes,
    tiles: Tiles,
    place: Place,
    interpret: bool,
) -> None:
    row, kv_head, tile = place(pl.program_id(0))
    first = tile * tiles.keys
    kv_length = sizes.num_keys if masks.kv_lengths is None else masks.kv_lengths[row]
    keys = Tile(first + jnp.arange(tiles.keys), kv_length)
    kv_segments = None if masks.kv_segments is None else keys.load_vector(masks.kv_segments)[:, None]
    k, v = keys.load(k_ref, sizes.head_dim), keys.load(v_ref, sizes.head_dim)

    def visit(index: jax.Array, carry: Any, *, masked: bool, member: jax.Array) -> tuple[jax.Array, jax.Array]:
        dk, dv = carry
        window = pl.ds(index * tiles.queries, tiles.queries)
        queries = Tile(index * tiles.queries + jnp.arange(tiles.queries), sizes.num_queries)
        q_segments = None
        if masks.q_segments is not None:
            q_segments = queries.load_vector(masks.q_segments.at[window])[None, :]
        slope = None if masks.slopes is None else masks.slopes[row, kv_head * sizes.group + member]
        positions = (queries.rows + sizes.offset)[None, :]
        pairs = Pairs(positions, keys.rows[:, None], kv_length, q_segments, kv_segments, slope)
        q = queries.load(q_ref.at[window, member, :], sizes.head_dim, whole=not masked)
        grad = queries.load(grad_ref.at[window, member, :], sizes.head_dim, whole=not masked)
        lse = queries.load_vector(lse_ref.at[member, window])[None, :]
        delta = queries.load_vector(delta_ref.at[member, window])[None, :]
        weights, cap_slope = _weights(
            pairs, spec, dot(k, q, (1, 1), interpret=interpret), lse, masked=masked, interpret=interpret
        )
        dv = dv + dot(weights.astype(grad.dtype), grad, (1, 0), interpret=interpret)
        d_logits = weights * (dot(v, grad, (1, 1), interpret=interpret) - delta)
        if cap_slope is not None:
            d_logits = d_logits * cap_slope
        return dk + dot(d_logits.astype(q.dtype), q, (1, 0), interpret=interpret), dv

    span = queries_of(spec, first, first + tiles.keys - 1, kv_length, sizes.num_queries, sizes.offset)
    cut_keys = masks.kv_lengths is not None or sizes.num_keys % tiles.keys != 0

    def visit_head(member: jax.Array, carry: Any) -> Any:
        return walk(
            span,
            tiles.queries,
            partial(visit, member=member),
            carry,
            all_masked=masks.everywhere,
            masked_head=spec.right is not None,
            masked_tail=spec.left is not None or cut_keys or sizes.num_queries % tiles.queries != 0,
        )

    zeros = jnp.zeros((tiles.keys, sizes.lanes), jnp.float32)
    dk, dv = lax.fori_loop(0, sizes.group, visit_head, (zeros, zeros))
    written = Tile(keys.rows, sizes.num_keys)
    written.store(dk_ref, dk * spec.scale, sizes.head_dim)
    written.store(dv_ref, dv, sizes.head_dim)


def _weights(
    pairs: Pairs, spec: AttentionSpec, products: jax.Array, lse: jax.Array, *, masked: bool, interpret: bool
) -> tuple[jax.Array, jax.Array | None]:
    """The softmax's weights again, and the derivative of the soft cap."""
    logits, factor, cap_slope = pairs.logits(spec, products)
    weights = jnp.exp2(scaled_sum(logits, factor, lse * -LOG2_E, interpret=interpret))
    if masked:
        # Also where a query sees nothing: its log-sum-exp is -inf.
        weights = jnp.where(pairs.visible(spec), weights, 0.0)
    return weights, cap_slope
