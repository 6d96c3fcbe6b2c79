"""Flash attention in plain XLA, forward and backward: tiled, online softmax, memory linear in the tokens.

For CPUs, and for what the kernels cannot do. All rows and heads walk over their tiles together; the last tile of an
axis slides back to end with it, so that nothing is padded or copied.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.flash_attention.logits import LOG2_E, Logits, alibi_bias, base2_logits
from pallas_kernels.flash_attention.spec import AttentionSpec, Masks, Span, keys_of, sees

TILE = 128
"""Queries and keys of a tile."""

FLOOR = -1e30
"""Where running maxima start; finite, so that no infinities are subtracted."""


class _Call(NamedTuple):
    """Operands and sizes that all tiles share; G query heads of a KV head lie side by side as rows of one product."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    masks: Masks
    spec: AttentionSpec

    @property
    def group(self) -> int:
        return self.q.shape[2] // self.k.shape[2]

    @property
    def offset(self) -> int:
        return self.k.shape[1] - self.q.shape[1]

    @property
    def q_tile(self) -> int:
        return min(TILE, self.q.shape[1])

    @property
    def kv_tile(self) -> int:
        return min(TILE, self.k.shape[1])

    @property
    def num_q_tiles(self) -> int:
        return -(-self.q.shape[1] // self.q_tile)

    def queries(self, index: jax.Array) -> "_Tile":
        return _Tile.at(index, self.q_tile, self.q.shape[1])

    def keys(self, index: jax.Array) -> "_Tile":
        return _Tile.at(index, self.kv_tile, self.k.shape[1])

    def fold(self, array: jax.Array, queries: "_Tile") -> jax.Array:
        """A tile of ``[B, T, N, H]`` as ``[B, K, G * tile, H]``."""
        tile = queries.of(array)
        batch, size, heads, head_dim = tile.shape
        tile = tile.reshape(batch, size, heads // self.group, self.group, head_dim)
        return tile.transpose(0, 2, 3, 1, 4).reshape(batch, heads // self.group, self.group * size, head_dim)

    def unfold(self, tile: jax.Array) -> jax.Array:
        """The inverse of `fold`: ``[B, tile, N, H]``."""
        batch, kv_heads, rows, head_dim = tile.shape
        tile = tile.reshape(batch, kv_heads, self.group, rows // self.group, head_dim)
        return tile.transpose(0, 3, 1, 2, 4).reshape(batch, rows // self.group, kv_heads * self.group, head_dim)

    def fold_rows(self, array: jax.Array, queries: "_Tile") -> jax.Array:
        """A tile of ``[B, N, T]`` as ``[B, K, G * tile, 1]``."""
        tile = lax.dynamic_slice_in_dim(array, queries.start, queries.size, axis=2)
        return tile.reshape(tile.shape[0], self.k.shape[2], -1, 1)

    def load_keys(self, array: jax.Array, keys: "_Tile") -> jax.Array:
        """A tile of k or v, 0 past the end of each row: what lies there may be NaN."""
        tile = keys.of(array)
        if self.masks.kv_lengths is None:
            return tile
        return jnp.where((keys.rows < self.masks.kv_lengths[:, None])[:, :, None, None], tile, 0)

    def span(self, queries: "_Tile") -> Span:
        """Keys that any row's queries see."""
        length = jnp.int32(self.k.shape[1]) if self.masks.kv_lengths is None else jnp.max(self.masks.kv_lengths)
        first = queries.start + self.offset
        return keys_of(self.spec, first, first + self.q_tile - 1, length, self.k.shape[1])

    def logits(self, q: jax.Array, k: jax.Array, queries: "_Tile", keys: "_Tile") -> tuple[Logits, jax.Array]:
        """Logits of a tile and which of them count, both of or broadcastable to ``[B, K, G * tile, keys]``."""
        masks, position = self.masks, (queries.rows + self.offset)[:, None]
        bias = None
        if masks.slopes is not None:
            bias = alibi_bias(masks.slopes[:, :, None, None], position, keys.rows)
            bias = bias.reshape(bias.shape[0], self.k.shape[2], -1, self.kv_tile)
        logits = base2_logits(self.spec, _einsum("bkmh,bskh->bkms", q, k), bias)
        q_segments = None if masks.q_segments is None else queries.of(masks.q_segments)[:, :, None]
        kv_segments = None if masks.kv_segments is None else keys.of(masks.kv_segments)[:, None, :]
        lengths = jnp.full(1, self.k.shape[1]) if masks.kv_lengths is None else masks.kv_lengths
        visible = sees(self.spec, position, keys.rows, lengths[:, None, None], q_segments, kv_segments)
        visible = visible & queries.fresh[:, None] & keys.fresh
        return logits, jnp.tile(visible, (1, self.group, 1))[:, None]


class _Tile(NamedTuple):
    """Rows of an axis; of a last tile that slid back only the `fresh` ones were not in the tile before."""

    start: jax.Array
    size: int
    rows: jax.Array
    fresh: jax.Array

    @classmethod
    def at(cls, number: jax.Array, size: int, length: int) -> "_Tile":
        start = jnp.minimum(number * size, length - size)
        rows = start + jnp.arange(size)
        return cls(start, size, rows, rows >= number * size)

    def of(self, array: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(array, self.start, self.size, axis=1)

    def put(self, array: jax.Array, tile: jax.Array) -> jax.Array:
        """`array` with the fresh rows of `tile` in place."""
        fresh = self.fresh.reshape(1, -1, *[1] * (array.ndim - 2))
        tile = jnp.where(fresh, tile.astype(array.dtype), self.of(array))
        return lax.dynamic_update_slice_in_dim(array, tile, self.start, axis=1)

    def add(self, array: jax.Array, tile: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(array, self.of(array) + tile, self.start, axis=1)


def flash_attention_xla(
    q: jax.Array, k: jax.Array, v: jax.Array, masks: Masks, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """The forward pass: output ``[B, T, N, H]`` in q's dtype, log-sum-exp ``float32[B, N, T]``."""
    call = _Call(q, k, v, masks, spec)

    def attend(number: jax.Array, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        queries = call.queries(number)
        out, lse = _attend_tile(call, queries)
        return queries.put(results[0], call.unfold(out)), queries.put(results[1], call.unfold(lse)[..., 0])

    lse = jnp.zeros(q.shape[:3], jnp.float32)
    out, lse = lax.fori_loop(0, call.num_q_tiles, attend, (jnp.zeros_like(q), lse))
    return out, lse.transpose(0, 2, 1)


def _attend_tile(call: _Call, queries: _Tile) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp of a tile, ``[B, K, G * tile, H]`` and ``[B, K, G * tile, 1]``."""
    q = call.fold(call.q, queries)

    def visit(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        best, total, mixed = carry
        keys = call.keys(number)
        (logits, factor, _), visible = call.logits(q, call.load_keys(call.k, keys), queries, keys)
        logits = jnp.where(visible, logits * factor, -jnp.inf)
        new_best = jnp.maximum(best, logits.max(-1, keepdims=True))
        weights, decay = jnp.exp2(logits - new_best), jnp.exp2(best - new_best)
        v = call.load_keys(call.v, keys)
        mixed = mixed * decay + _einsum("bkms,bskh->bkmh", weights.astype(v.dtype), v)
        return new_best, total * decay + weights.sum(-1, keepdims=True), mixed

    span, rows = call.span(queries), (*q.shape[:3], 1)
    start = (jnp.full(rows, FLOOR), jnp.zeros(rows), jnp.zeros(q.shape, jnp.float32))
    bounds = span.start // call.kv_tile, (span.stop + call.kv_tile - 1) // call.kv_tile
    best, total, mixed = lax.fori_loop(*bounds, visit, start)
    seen = total > 0
    lse = jnp.where(seen, (best + jnp.log2(jnp.where(seen, total, 1.0))) / LOG2_E, -jnp.inf)
    return mixed / jnp.where(seen, total, 1.0), lse


def flash_attention_xla_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    masks: Masks,
    lse: jax.Array,
    delta: jax.Array,
    grad: jax.Array,
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The backward pass: dq, dk, dv; arguments as of `query_gradient_triton`."""
    call = _Call(q, k, v, masks, spec)

    def visit_queries(number: jax.Array, grads: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        queries = call.queries(number)
        dq_tile, dk, dv = _gradient_tile(call, queries, lse, delta, grad, grads[1:])
        return queries.put(grads[0], call.unfold(dq_tile)), dk, dv

    zeros = jnp.zeros(k.shape, jnp.float32)
    dq, dk, dv = lax.fori_loop(0, call.num_q_tiles, visit_queries, (jnp.zeros_like(q), zeros, zeros))
    return dq, (dk * spec.scale).astype(k.dtype), dv.astype(v.dtype)


def _gradient_tile(
    call: _Call, queries: _Tile, lse: jax.Array, delta: jax.Array, grad: jax.Array, grads: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq of a tile of queries, ``[B, K, G * tile, H]``, and ``(dk, dv)`` with its share added."""
    q, grad_tile = call.fold(call.q, queries), call.fold(grad, queries)
    lse_tile, delta_tile = call.fold_rows(lse, queries) * LOG2_E, call.fold_rows(delta, queries)

    def visit(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        dq, dk, dv = carry
        keys = call.keys(number)
        k, v = call.load_keys(call.k, keys), call.load_keys(call.v, keys)
        (logits, factor, slope), visible = call.logits(q, k, queries, keys)
        weights = jnp.where(visible, jnp.exp2(logits * factor - lse_tile), 0.0)
        d_logits = weights * (_einsum("bkmh,bskh->bkms", grad_tile, v) - delta_tile)
        if slope is not None:
            d_logits = d_logits * slope
        d_logits = d_logits.astype(k.dtype)
        dv = keys.add(dv, _einsum("bkms,bkmh->bskh", weights.astype(v.dtype), grad_tile))
        dk = keys.add(dk, _einsum("bkms,bkmh->bskh", d_logits, q))
        return dq + _einsum("bkms,bskh->bkmh", d_logits, k), dk, dv

    span = call.span(queries)
    bounds = span.start // call.kv_tile, (span.stop + call.kv_tile - 1) // call.kv_tile
    dq, dk, dv = lax.fori_loop(*bounds, visit, (jnp.zeros(q.shape, jnp.float32), *grads))
    return dq * call.spec.scale, dk, dv


def _einsum(formula: str, *operands: jax.Array) -> jax.Array:
    """Accumulates in float32; float32 operands are not rounded to TF32 on a GPU."""
    precision = lax.Precision.HIGHEST if operands[0].dtype == jnp.float32 else None
    return jnp.einsum(formula, *operands, precision=precision, preferred_element_type=jnp.float32)
