"""The kernels of ragged paged attention for Pallas's Triton backend: one that attends, one that merges.

Both run once for each item of a `split_plan.SplitPlan` and KV head. FlashAttention's online softmax (arXiv:2205.14135)
in base 2; query heads of a KV head share a tile, so that a decode step's product has ``G`` rows to fill the tensor
core's 16 with; the keys of a tile are gathered row by row through the block table.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.paged_attention.code_ptx import decode, decode_int4
from pallas_kernels.paged_attention.split_plan import PART, UNIT, tokens_of

MASKED = -1e30
"""Finite, since infinity less itself is NaN."""

LOG2E = math.log2(math.e)

Carry = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True)
class KernelSpec:
    """What is fixed when the kernel is compiled.

    Attributes:
        block_m, block_kv: rows (tokens times heads of the group) and positions of a tile.
        parts: programs that share a tile of the plan, each with `block_m` of its rows.
        group: query heads of a KV head.
        num_kv_heads, head_dim, page_size: K, H, S.
        pages_dtype: of the pool.
        packed: two int4 codes a byte.
        quantized: pages have scales.
        paired: the pool's bytes come as int16 pairs.
        as_bytes: the pool's float8 elements come as int8.
        scale, window, softcap: as in `paged_attention`.
        tree: whether there is a tree mask.
        edges: whether tiles at the ends of what is visible have a loop of their own, so that the others need no mask.
        num_aliased: operands that only carry what the kernel before wrote.
        precision: of the matrix products.
        interpret: whether the kernel is interpreted, which knows no PTX.
    """

    block_m: int
    block_kv: int
    parts: int
    group: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    pages_dtype: Any
    packed: bool
    quantized: bool
    paired: bool
    as_bytes: bool
    scale: float
    window: int | None
    softcap: float | None
    tree: bool
    edges: bool
    num_aliased: int
    precision: Any
    interpret: bool

    @property
    def channels(self) -> int:
        """H rounded up to a power of two, and to what the tensor core contracts over at a time."""
        return max(pl.next_power_of_2(self.head_dim), 16)

    @property
    def part_rows(self) -> int:
        """Rows that hold a whole number of tokens."""
        return min(self.block_m, PART)

    def for_tiles(self, block_m: int, parts: int, block_kv: int, edges: bool, num_aliased: int) -> "KernelSpec":
        """The same operation on tiles of a size."""
        return replace(
            self,
            block_m=block_m,
            parts=parts,
            block_kv=block_kv,
            edges=self.edges or edges,
            num_aliased=num_aliased,
        )


@dataclass(frozen=True)
class _Refs:
    items: Any
    q: Any
    pages: Any
    tables: Any
    scales: Any
    tree: Any
    query_start: Any
    context_lens: Any
    out: Any
    partial: Any
    lse: Any


@dataclass(frozen=True)
class _Tile:
    """Scalars of an item, and which token and position each row of the tile is."""

    row: jax.Array
    head: jax.Array
    low: jax.Array
    high: jax.Array
    cached: jax.Array | None
    is_tree: jax.Array | None
    tokens: jax.Array
    positions: jax.Array


def attend_kernel(spec: KernelSpec, *refs: Any) -> None:
    """Attention of one piece of one tile for one KV head; operands as in `triton.py`."""
    named = _name(spec, refs)
    index = pl.program_id(0)
    head, index = lax.rem(index, spec.num_kv_heads), lax.div(index, spec.num_kv_heads)
    item, part = lax.div(index, spec.parts), lax.rem(index, spec.parts)
    skipped = part * tokens_of(spec.block_m, spec.group)
    size = jnp.minimum(named.items[item, 2] - skipped, tokens_of(spec.block_m, spec.group))

    @pl.when(size > 0)
    def attend() -> None:
        _attend(spec, named, item, head, skipped, size, part * (spec.block_m // UNIT))


def _name(spec: KernelSpec, refs: Sequence[Any]) -> _Refs:
    rest = iter(refs)
    items, q, pages, tables = (next(rest) for _ in range(4))
    scales = next(rest) if spec.quantized else None
    tree, query_start, context_lens = (next(rest) if spec.tree else None for _ in range(3))
    for _ in range(spec.num_aliased):
        next(rest)
    return _Refs(items, q, pages, tables, scales, tree, query_start, context_lens, *rest)


def _attend(
    spec: KernelSpec,
    refs: _Refs,
    item: jax.Array,
    head: jax.Array,
    skipped: jax.Array,
    size: jax.Array,
    unit: jax.Array,
) -> None:
    """Tokens ``skipped .. skipped + size - 1`` of an item, whose partial result starts with its `unit`-th unit."""
    row = refs.items[item, 0]
    first, position = refs.items[item, 1] + skipped, refs.items[item, 3] + skipped
    low, high, first_unit = (refs.items[item, field] for field in (4, 5, 6))
    cached = is_tree = None
    if spec.tree:
        context, new = refs.context_lens[row], refs.query_start[row + 1] - refs.query_start[row]
        cached, is_tree = context - new, new <= refs.tree.shape[1]
        # The plan knows of causal tokens only: a tree's may see ones after them, and be less deep than their index.
        tile_position = refs.items[item, 3]
        high = jnp.where(is_tree & (high == tile_position + refs.items[item, 2]) & (high > 0), context, high)
        if spec.window is not None:
            is_first = is_tree & (low == jnp.maximum(tile_position - spec.window + 1, 0))
            low = jnp.maximum(jnp.where(is_first, cached - spec.window + 1, low), 0)
    line = jnp.arange(spec.block_m)
    part, within = lax.div(line, spec.part_rows), lax.rem(line, spec.part_rows)
    per_part = tokens_of(spec.part_rows, spec.group)
    index = part * per_part + lax.div(within, spec.group)
    valid = (index < size) & (within < per_part * spec.group)
    tokens = jnp.where(valid, first + index, first)
    positions = position + index
    if cached is not None and is_tree is not None and spec.window is not None:
        positions = jnp.where(is_tree, cached + _depths(spec, refs, tokens, row), positions)
    tile = _Tile(row, head, low, high, cached, is_tree, tokens, positions)
    heads = head * spec.group + lax.rem(within, spec.group)
    query = _load_query(spec, refs.q, tokens, heads)

    best, total, mixed = _softmax(spec, refs, tile, query, position, size)
    # Rows without a visible key have summed exp2(0) of masked ones; a NaN total is a visible NaN key's.
    blind = (best <= MASKED / 2) & (total >= 0)
    total = jnp.where(total == 0.0, 1.0, total)
    result = jnp.where(blind[:, None], 0.0, mixed / total[:, None])

    @pl.when(first_unit < 0)
    def write_result() -> None:
        # Rows that do not count keep away from those that do: the interpreter writes them too, as they were.
        target = refs.out.at[(first + index)[:, None], heads[:, None], jnp.arange(spec.channels)[None, :]]
        mask = valid[:, None] & (jnp.arange(spec.channels) < spec.head_dim)[None, :]
        plt.store(target, result.astype(refs.out.dtype), mask=mask)

    @pl.when(first_unit >= 0)
    def write_partial() -> None:
        units, lines = first_unit + unit + lax.div(line, UNIT), lax.rem(line, UNIT)
        logsum = jnp.where(blind, MASKED, best + jnp.log2(total))
        plt.store(refs.lse.at[units, head, lines], logsum, mask=valid)
        target = refs.partial.at[units[:, None], head, lines[:, None], jnp.arange(spec.channels)[None, :]]
        plt.store(target, result, mask=jnp.broadcast_to(valid[:, None], result.shape))


def _load_query(spec: KernelSpec, q: Any, tokens: jax.Array, heads: jax.Array) -> jax.Array:
    """[block_m, channels]."""
    channels = jnp.arange(spec.channels)[None, :]
    target = q.at[tokens[:, None], heads[:, None], channels]
    if spec.channels == spec.head_dim:
        return plt.load(target)
    mask = jnp.broadcast_to(channels < spec.head_dim, (spec.block_m, spec.channels))
    return plt.load(target, mask=mask, other=0.0)


def _softmax(
    spec: KernelSpec, refs: _Refs, tile: _Tile, query: jax.Array, position: jax.Array, size: jax.Array
) -> Carry:
    """Row maxima, sums and weighted values over the piece, tile by tile."""

    def step(masked: bool) -> Callable[[jax.Array, Carry], Carry]:
        return lambda index, carry: _step(spec, refs, tile, query, masked, index, carry)

    carry: Carry = (
        jnp.full((spec.block_m,), MASKED, jnp.float32),
        jnp.zeros((spec.block_m,), jnp.float32),
        jnp.zeros((spec.block_m, spec.channels), jnp.float32),
    )
    count = pl.cdiv(jnp.maximum(tile.high - tile.low, 0), spec.block_kv)
    if not spec.edges:
        return lax.fori_loop(0, count, step(True), carry)
    open_from = jnp.int32(0)
    if spec.window is not None:
        last_sees_from = jnp.clip(position + size - spec.window, tile.low, jnp.maximum(tile.high, tile.low))
        open_from = pl.cdiv(last_sees_from - tile.low, spec.block_kv)
        carry = lax.fori_loop(0, open_from, step(True), carry)
    all_see_to = jnp.minimum(tile.high, position + 1 if tile.cached is None else tile.cached)
    open_to = jnp.maximum(lax.div(jnp.maximum(all_see_to - tile.low, 0), spec.block_kv), open_from)
    carry = lax.fori_loop(open_from, open_to, step(False), carry)
    return lax.fori_loop(open_to, count, step(True), carry)


def _step(
    spec: KernelSpec, refs: _Refs, tile: _Tile, query: jax.Array, masked: bool, index: jax.Array, carry: Carry
) -> Carry:
    best, total, mixed = carry
    positions = tile.low + index * spec.block_kv + jnp.arange(spec.block_kv)
    # Past the end, the last position again: its page is one of the row's, and what is read there is finite.
    where = jnp.minimum(positions, tile.high - 1) if masked else positions
    pages = refs.tables[tile.row, _quotient(where, spec.page_size)]
    offsets = _remainder(where, spec.page_size)
    keys = _load_rows(spec, refs.pages, pages, 2 * tile.head, offsets)
    values = _load_rows(spec, refs.pages, pages, 2 * tile.head + 1, offsets)
    logits = plt.dot(query, _decoded(spec, keys, query.dtype), trans_b=True, precision=spec.precision)
    if spec.quantized:
        logits = logits * refs.scales[pages, 2 * tile.head, offsets][None, :]
    logits = _scaled(spec, logits)
    if masked:
        logits = jnp.where(_visible(spec, refs, tile, positions), logits, MASKED)
    new_best = jnp.maximum(best, jnp.max(logits, axis=1))
    weights = jnp.exp2(logits - new_best[:, None])
    decay = jnp.exp2(best - new_best)
    total = total * decay + jnp.sum(weights, axis=1)
    dtype = query.dtype
    if spec.quantized:
        weights = weights * refs.scales[pages, 2 * tile.head + 1, offsets][None, :]
        # Scales may lie far from 1, beyond float16.
        dtype = jnp.bfloat16 if dtype == jnp.float16 else dtype
        values = _decoded(spec, values, dtype, in_registers=True)
    return new_best, total, mixed * decay[:, None] + plt.dot(weights.astype(dtype), values, precision=spec.precision)


def _load_rows(spec: KernelSpec, ref: Any, pages: jax.Array, head_row: jax.Array, offsets: jax.Array) -> jax.Array:
    """Keys or values of the positions as they are stored: [block_kv, channels], or half as many bytes of int4."""
    per_element = (2 if spec.packed else 1) * (2 if spec.paired else 1)
    if spec.channels == spec.head_dim:
        rows = ref[pages, head_row, offsets]
    else:
        elements = jnp.arange(spec.channels // per_element)[None, :]
        mask = jnp.broadcast_to(elements < spec.head_dim // per_element, (spec.block_kv, spec.channels // per_element))
        rows = plt.load(ref.at[pages[:, None], head_row, offsets[:, None], elements], mask=mask, other=0)
    if spec.as_bytes:
        return lax.bitcast_convert_type(rows, spec.pages_dtype)
    if not spec.paired:
        return rows
    pair = (rows.astype(jnp.int8), lax.shift_right_logical(rows, jnp.int16(8)).astype(jnp.int8))
    return lax.bitcast_convert_type(jnp.stack(pair, axis=2).reshape(spec.block_kv, -1), spec.pages_dtype)


def _decoded(spec: KernelSpec, rows: jax.Array, dtype: Any, in_registers: bool = False) -> jax.Array:
    """[block_kv, channels] as the product wants them.

    Args:
        spec: what is fixed.
        rows: as `_load_rows` returns them.
        dtype: of the result.
        in_registers: convert whole rows as they were loaded and go through shared memory afterwards. Otherwise Triton
            fetches the codes from shared memory the way the product wants them, which for 8-bit values, whose positions
            are what is contracted over, takes a load for each byte.
    """
    if spec.packed:
        pair = decode_int4(rows, spec.interpret)
    elif in_registers:
        even, odd = jnp.unstack(rows.reshape(spec.block_kv, spec.channels // 2, 2), axis=2)
        pair = decode(even, spec.interpret), decode(odd, spec.interpret)
    else:
        return decode(rows, spec.interpret).astype(dtype)
    return jnp.stack([part.astype(dtype) for part in pair], axis=2).reshape(spec.block_kv, spec.channels)


def _scaled(spec: KernelSpec, logits: jax.Array) -> jax.Array:
    """Logits for `exp2`, soft-capped."""
    if spec.softcap is None:
        return logits * (spec.scale * LOG2E)
    # tanh(x) = 1 - 2 / (exp(2 x) + 1)
    doubled = jnp.exp2(logits * (2 * LOG2E * spec.scale / spec.softcap))
    return spec.softcap * LOG2E - (2 * spec.softcap * LOG2E) / (doubled + 1.0)


def _visible(spec: KernelSpec, refs: _Refs, tile: _Tile, positions: jax.Array) -> jax.Array:
    """bool[block_m, block_kv]."""
    there = positions < tile.high
    causal = positions[None, :] <= tile.positions[:, None]
    causal &= there[None, :]
    if spec.window is not None:
        causal &= positions[None, :] > tile.positions[:, None] - spec.window
    if tile.cached is None or tile.is_tree is None:
        return causal
    among_new = positions - tile.cached
    width = refs.tree.shape[1]
    in_tree = refs.tree[tile.tokens[:, None], jnp.clip(among_new, 0, width - 1)[None, :]]
    old = (among_new < 0)[None, :]
    if spec.window is not None:
        old = old & (positions[None, :] > tile.positions[:, None] - spec.window)
    new = (among_new >= 0) & (among_new < width)
    return jnp.where(tile.is_tree, (old | (in_tree & new[None, :])) & there[None, :], causal)


def _depths(spec: KernelSpec, refs: _Refs, tokens: jax.Array, row: jax.Array) -> jax.Array:
    """int32[block_m]: how many of its row's new tokens each token sees, less one, at least 0."""
    width = refs.tree.shape[1]
    node = jnp.arange(pl.next_power_of_2(width))
    named = refs.tree[tokens[:, None], jnp.minimum(node, width - 1)[None, :]]
    real = (node < width) & (node < refs.query_start[row + 1] - refs.query_start[row])
    return jnp.maximum(jnp.sum((named & real[None, :]).astype(jnp.int32), axis=1) - 1, 0)


def _quotient(value: jax.Array, divisor: int) -> jax.Array:
    """Of values >= 0; dividing by a power of two otherwise costs a correction for negative ones."""
    power = divisor.bit_length() - 1
    return value >> power if divisor == 1 << power else lax.div(value, divisor)


def _remainder(value: jax.Array, divisor: int) -> jax.Array:
    return value & (divisor - 1) if divisor & (divisor - 1) == 0 else lax.rem(value, divisor)


@dataclass(frozen=True)
class MergeSpec:
    """What is fixed when the merge is compiled.

    Attributes:
        rows: the most rows of a tile.
        group, num_kv_heads, head_dim: G, K, H.
        channels: of a partial result, padding included.
        block: pieces added at a time.
    """

    rows: int
    group: int
    num_kv_heads: int
    head_dim: int
    channels: int
    block: int


def merge_kernel(spec: MergeSpec, merges: Any, partial: Any, lse: Any, _out: Any, out: Any) -> None:
    """Adds up the pieces of one row (a token's query head) of one tile; operands as in `triton.py`."""
    index = pl.program_id(0)
    line, index = lax.rem(index, spec.rows), lax.div(index, spec.rows)
    head, index = lax.rem(index, spec.num_kv_heads), lax.div(index, spec.num_kv_heads)
    per_part, within = tokens_of(PART, spec.group), lax.rem(line, PART)
    token = lax.div(line, PART) * per_part + lax.div(within, spec.group)

    @pl.when((token < merges[index, 1]) & (within < per_part * spec.group))
    def merge() -> None:
        result = _merged(spec, merges, partial, lse, index, head, line)
        channels = jnp.arange(spec.channels)
        query_head = head * spec.group + lax.rem(within, spec.group)
        target = out.at[merges[index, 0] + token, query_head, channels]
        plt.store(target, result.astype(out.dtype), mask=channels < spec.head_dim)


def _merged(
    spec: MergeSpec, merges: Any, partial: Any, lse: Any, index: jax.Array, head: jax.Array, line: jax.Array
) -> jax.Array:
    """float32[channels]."""
    first_unit, stride, pieces = (merges[index, field] for field in (2, 3, 4))
    unit, line_of_unit = first_unit + lax.div(line, UNIT), lax.rem(line, UNIT)
    channels = jnp.arange(spec.channels)[None, :]

    def add(step: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        best, total, mixed = carry
        nth = step * spec.block + jnp.arange(spec.block)
        exists, units = nth < pieces, unit + jnp.minimum(nth, pieces - 1) * stride
        logsum = jnp.where(exists, lse[units, head, line_of_unit], MASKED)
        mask = jnp.broadcast_to(exists[:, None], (spec.block, spec.channels))
        results = plt.load(partial.at[units[:, None], head, line_of_unit, channels], mask=mask, other=0.0)
        new_best = jnp.maximum(best, jnp.max(logsum))
        # A piece without a visible key has MASKED too, and weight 1 until one with a key comes.
        weights = jnp.where(exists, jnp.exp2(logsum - new_best), 0.0)
        decay = jnp.exp2(best - new_best)
        mixed = mixed * decay + jnp.sum(results * weights[:, None], axis=0)
        return new_best, total * decay + jnp.sum(weights), mixed

    carry = (jnp.float32(MASKED), jnp.float32(0.0), jnp.zeros((spec.channels,), jnp.float32))
    _, total, mixed = lax.fori_loop(0, pl.cdiv(pieces, spec.block), add, carry)
    return mixed / total
