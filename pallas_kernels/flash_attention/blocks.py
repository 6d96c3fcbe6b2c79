"""What the Triton kernels share: sizes, how a program finds its operands, masked loads, and the walk over tiles."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.flash_attention.logits import Logits, alibi_bias, base2_logits
from pallas_kernels.flash_attention.spec import AttentionSpec, Masks, Span, sees

Place = Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
"""From a program's number to (row of the batch, head, tile)."""


class Sizes(NamedTuple):
    """Extents of a call."""

    batch: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, q: jax.Array, k: jax.Array) -> "Sizes":
        """Those of ``q[B, T, N, H]`` and ``k[B, S, K, H]``."""
        return cls(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3])

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def offset(self) -> int:
        """Position of query 0."""
        return self.num_keys - self.num_queries

    @property
    def lanes(self) -> int:
        """Channels of a tile: a power of two; those past the head dimension are masked."""
        return pl.next_power_of_2(max(self.head_dim, 16))


def place_of(num_tiles: int, num_heads: int, *, last_first: bool) -> Place:
    """Tiles of a head side by side, so that what they share stays in the L2 cache; those that take longest first."""

    def place(program: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        head, tile = lax.div(program, num_tiles), lax.rem(program, num_tiles)
        return lax.div(head, num_heads), lax.rem(head, num_heads), num_tiles - 1 - tile if last_first else tile

    return place


def mask_specs(masks: Masks, place: Place, q_block: int | None, k_block: int | None) -> Any:
    """Block specs of the operands that are there: a tile of the segments, or all of a row's where the block is None."""

    def segments(array: jax.Array | None, block: int | None) -> pl.BlockSpec | None:
        if array is None:
            return None
        if block is None:
            return pl.BlockSpec((None, array.shape[1]), lambda program: (place(program)[0], 0))
        return pl.BlockSpec((None, block), lambda program: (place(program)[0], place(program)[2]))

    def whole(array: jax.Array | None) -> Any:
        return None if array is None else pl.BlockSpec(array.shape, lambda _: (0,) * array.ndim)

    specs: tuple[Any, Any] = (segments(masks.q_segments, q_block), segments(masks.kv_segments, k_block))
    return Masks(*specs, whole(masks.kv_lengths), whole(masks.slopes))


class Tile(NamedTuple):
    """Rows of an operand that a program holds or is about to visit.

    Attributes:
        rows: int32[R], which.
        limit: how many rows the operand has; those past it are not read.
    """

    rows: jax.Array
    limit: jax.Array | int

    @property
    def exists(self) -> jax.Array:
        """bool[R]."""
        return self.rows < self.limit

    def load(self, ref: Any, head_dim: int, *, whole: bool = False) -> jax.Array:
        """``[R, lanes]`` of a reference that shows these rows; 0 where they, or channels, do not exist.

        `whole` promises that all rows do.
        """
        lanes = ref.shape[-1]
        in_head = (jnp.arange(lanes) < head_dim)[None, :]
        if whole and lanes == head_dim:
            return plt.load(ref)
        return plt.load(ref, mask=in_head if whole else self.exists[:, None] & in_head, other=0.0)

    def store(self, ref: Any, values: jax.Array, head_dim: int) -> None:
        """Writes ``[R, lanes]`` to the rows and channels that exist."""
        in_head = (jnp.arange(values.shape[1]) < head_dim)[None, :]
        plt.store(ref, values.astype(ref.dtype), mask=self.exists[:, None] & in_head)

    def load_vector(self, ref: Any) -> jax.Array:
        """``[R]``, 0 where rows do not exist."""
        return plt.load(ref, mask=self.exists, other=0)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int], *, interpret: bool) -> jax.Array:
    """A product of tiles, accumulated in float32; float32 tiles go through three TF32 products on a GPU."""
    precision: Any = None
    if a.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def scaled_sum(values: jax.Array, factor: float, addend: jax.Array, *, interpret: bool) -> jax.Array:
    """``values * factor + addend`` in one instruction: XLA tells Triton to contract nothing by itself.

    Args:
        values: float32, a tile.
        factor: static.
        addend: float32, broadcast to the tile.
        interpret: what the interpreter cannot do is written out.
    """
    if factor == 1.0:
        return values + addend
    if interpret:
        return values * factor + addend
    operands = [values, jnp.full_like(values, factor), jnp.broadcast_to(addend, values.shape)]
    [result] = plt.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=operands,
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(values.shape, jnp.float32)],
    )
    return result


class Pairs(NamedTuple):
    """Which queries meet which keys in a tile of logits, however it is turned.

    Attributes:
        positions: int32, of the queries, ``[R, 1]`` or ``[1, R]``.
        keys: int32, the other way round.
        kv_length: keys that exist.
        q_segments, kv_segments: as `positions` and `keys`, or None.
        slope: ALiBi's, or None.
    """

    positions: jax.Array
    keys: jax.Array
    kv_length: jax.Array | int
    q_segments: jax.Array | None
    kv_segments: jax.Array | None
    slope: jax.Array | None

    def logits(self, spec: AttentionSpec, products: jax.Array) -> Logits:
        """Of the products of these queries and keys; see `base2_logits`."""
        bias = None if self.slope is None else alibi_bias(self.slope, self.positions, self.keys)
        return base2_logits(spec, products, bias)

    def visible(self, spec: AttentionSpec) -> jax.Array:
        """bool, shape of the tile."""
        return sees(spec, self.positions, self.keys, self.kv_length, self.q_segments, self.kv_segments)


def walk(
    span: Span,
    size: int,
    visit: Callable[..., Any],
    carry: Any,
    *,
    all_masked: bool,
    masked_head: bool,
    masked_tail: bool,
) -> Any:
    """Visits the tiles of a span in order: those that are cut with a mask, those in between without.

    Args:
        span: positions to visit.
        size: of a tile.
        visit: ``visit(index, carry, masked=...) -> carry``.
        carry: its first value.
        all_masked: no tile is free of masks.
        masked_head, masked_tail: whether tiles before, and after, the whole ones can be cut at all.
    """
    begin, end = lax.div(span.start, size), lax.div(span.stop + (size - 1), size)
    masked, whole = partial(visit, masked=True), partial(visit, masked=False)
    if all_masked:
        return lax.fori_loop(begin, end, masked, carry)
    full_begin = jnp.minimum(lax.div(span.full_start + (size - 1), size), end)
    full_end = jnp.clip(lax.div(span.full_stop, size), full_begin, end)
    if masked_head:
        carry = lax.fori_loop(begin, full_begin, masked, carry)
    carry = lax.fori_loop(full_begin, full_end, whole, carry)
    if masked_tail:
        carry = lax.fori_loop(full_end, end, masked, carry)
    return carry
