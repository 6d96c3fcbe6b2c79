"""The kernel for Pallas's Triton backend: one tile of the result, over one piece of the channels.

For few tokens the codes themselves meet x on the tensor cores, exactly, and the scale meets the sum of a group; what
the offset adds is the sum of x over the group times it. For many tokens weights are made of the codes first, once for
all the rows of a tile.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.quantized_matmul.code_ptx import (
    BIAS,
    decode_int4,
    decode_int8,
    fused_multiply_add,
    load_table,
    look_up,
)
from pallas_kernels.quantized_matmul.config import FEW_TOKENS, Tiles

SWIZZLE = 16
"""Tiles of tokens that share the weights' rows before the next rows come, so that both stay in the L2 cache."""


@dataclass(frozen=True)
class KernelSpec:
    """What is fixed when the kernel is compiled.

    Attributes:
        tiles: sizes.
        num_tokens, num_out, channels: M, N, K.
        bits, group: of the weights.
        has_offset, has_table: whether there is an offset, or a codebook.
        dtype: of x, and of the products.
        weights_first: whether weights are the first operand of products with many tokens. Hopper takes that one from
            registers; before it, the second is the one that fewer warps decode each for itself.
        interpret: whether the kernel is interpreted, which knows no PTX.
    """

    tiles: Tiles
    num_tokens: int
    num_out: int
    channels: int
    bits: int
    group: int
    has_offset: bool
    has_table: bool
    dtype: Any
    weights_first: bool
    interpret: bool

    @property
    def token_tiles(self) -> int:
        """Along M."""
        return -(-self.num_tokens // self.tiles.tokens)

    @property
    def out_tiles(self) -> int:
        """Along N."""
        return -(-self.num_out // self.tiles.out)

    @property
    def steps(self) -> int:
        """Tiles of channels, of all pieces."""
        return self.channels // self.tiles.into

    @property
    def bias(self) -> int:
        """What the decoded codes are too high by."""
        return BIAS if self.bits == 4 and not self.has_table and self.dtype == jnp.bfloat16 else 0

    @property
    def grouped(self) -> bool:
        """Whether the scale changes along a row."""
        return self.group < self.channels


@dataclass(frozen=True)
class _Refs:
    x: Any
    codes: Any
    scale: Any
    offset: Any
    out: Any


@dataclass(frozen=True)
class _Place:
    """Rows of x and of the weights in the tile; past the last one, that one again."""

    tokens: jax.Array
    outs: jax.Array
    out_start: jax.Array


def multiply_kernel(spec: KernelSpec, x: Any, codes: Any, scale: Any, *rest: Any) -> None:
    """Operands as in `triton.py`; the last is the result [splits, M, N]."""
    optional = list(rest[:-1])
    offset = optional.pop(0) if spec.has_offset else None
    table = load_table(optional.pop(0), spec.dtype, spec.interpret) if spec.has_table else None
    refs = _Refs(x, codes, scale, offset, rest[-1])
    tiles = spec.tiles
    token_tile, out_tile = _tile_of(spec, pl.program_id(0))
    tokens = token_tile * tiles.tokens + jnp.arange(tiles.tokens)
    outs = out_tile * tiles.out + jnp.arange(tiles.out)
    place = _Place(jnp.minimum(tokens, spec.num_tokens - 1), jnp.minimum(outs, spec.num_out - 1), out_tile * tiles.out)
    first = pl.program_id(1) * tiles.steps
    last = jnp.minimum(first + tiles.steps, spec.steps)
    multiply = _scale_sums if tiles.tokens <= FEW_TOKENS else _scale_weights
    result = multiply(spec, refs, place, table, first, last)
    target = refs.out.at[pl.program_id(1), tokens[:, None], outs[None, :]]
    mask = (tokens < spec.num_tokens)[:, None] & (outs < spec.num_out)[None, :]
    plt.store(target, result.astype(refs.out.dtype), mask=mask)


def _tile_of(spec: KernelSpec, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tiles along M and N of a program."""
    if spec.token_tiles == 1:
        return jnp.int32(0), index
    per_band = SWIZZLE * spec.out_tiles
    band, within = lax.div(index, per_band), lax.rem(index, per_band)
    height = jnp.minimum(spec.token_tiles - band * SWIZZLE, SWIZZLE)
    return band * SWIZZLE + lax.rem(within, height), lax.div(within, height)


def _scale_sums(
    spec: KernelSpec, refs: _Refs, place: _Place, table: Any, first: jax.Array, last: jax.Array
) -> jax.Array:
    """float32[tokens, out]: codes meet x, scales meet the groups' sums."""
    shifted = spec.has_offset or spec.bias != 0

    def product(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = _load_x(spec, refs, place, index)
        return x, plt.dot(x, _decoded(spec, refs, place, table, index), trans_b=True)

    def step(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        total, scale, shift = carry
        # Asked for a tile ahead: they are few bytes, and nothing else covers the time that they take.
        following = _factors(spec, refs, place, jnp.minimum(index + 1, last - 1))
        x, part = product(index)
        total = fused_multiply_add(part, scale[None, :], total, spec.interpret)
        if shifted:
            sums = jnp.sum(x.astype(jnp.float32), axis=1)
            total = fused_multiply_add(sums[:, None], shift[None, :], total, spec.interpret)
        return total, *following

    zero = jnp.zeros((spec.tiles.tokens, spec.tiles.out), jnp.float32)
    factors = _factors(spec, refs, place, first)
    if spec.grouped or shifted:
        total, _, _ = lax.fori_loop(first, last, step, (zero, *factors))
        return total
    return lax.fori_loop(first, last, lambda index, total: total + product(index)[1], zero) * factors[0][None, :]


def _scale_weights(
    spec: KernelSpec, refs: _Refs, place: _Place, table: Any, first: jax.Array, last: jax.Array
) -> jax.Array:
    """float32[tokens, out]: weights meet x."""
    scale_later = not spec.grouped and not spec.has_offset and not spec.bias

    def step(index: jax.Array, total: jax.Array) -> jax.Array:
        x = _load_x(spec, refs, place, index)
        weights = _decoded(spec, refs, place, table, index)
        if not scale_later:
            scale, shift = _factors(spec, refs, place, index)
            wide = weights.astype(jnp.float32)
            wide = fused_multiply_add(wide, scale[:, None], shift[:, None], spec.interpret)
            weights = wide.astype(spec.dtype)
        return total + (plt.dot(weights, x, trans_b=True) if spec.weights_first else plt.dot(x, weights, trans_b=True))

    shape = spec.tiles.tokens, spec.tiles.out
    zero = jnp.zeros(shape[::-1] if spec.weights_first else shape, jnp.float32)
    total = lax.fori_loop(first, last, step, zero)
    total = total.T if spec.weights_first else total
    return total * _factors(spec, refs, place, first)[0][None, :] if scale_later else total


def _load_x(spec: KernelSpec, refs: _Refs, place: _Place, index: jax.Array) -> jax.Array:
    """[tokens, into]."""
    return refs.x[place.tokens, pl.ds(index * spec.tiles.into, spec.tiles.into)]


def _decoded(spec: KernelSpec, refs: _Refs, place: _Place, table: Any, index: jax.Array) -> jax.Array:
    """[out, into]: entries of the table, or codes that are `spec.bias` too high."""
    width = spec.tiles.into // 2 if spec.bits == 4 else spec.tiles.into
    rows = pl.ds(place.out_start, spec.tiles.out) if spec.num_out % spec.tiles.out == 0 else place.outs
    codes = refs.codes[rows, pl.ds(index * width, width)]
    if spec.bits == 8:
        return decode_int8(codes, spec.dtype, spec.interpret)
    if table is None:
        pair = decode_int4(codes, spec.dtype, spec.interpret)
    else:
        pair = look_up(codes, table, spec.dtype, spec.interpret)
    return jnp.stack(pair, axis=2).reshape(spec.tiles.out, spec.tiles.into)


def _factors(spec: KernelSpec, refs: _Refs, place: _Place, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32[out], twice: the scale of a tile of channels, and what is added to code times scale."""
    group = lax.div(index * spec.tiles.into, spec.group) if spec.grouped else jnp.int32(0)
    scale = refs.scale[place.outs, group].astype(jnp.float32)
    shift = scale * -float(spec.bias)
    if spec.has_offset:
        shift = shift + refs.offset[place.outs, group].astype(jnp.float32)
    return scale, shift
