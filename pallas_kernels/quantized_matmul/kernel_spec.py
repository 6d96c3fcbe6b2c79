"""What the kernel for Pallas's Triton backend is compiled for, and how it reads its operands."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.quantized_matmul.code_ptx import BIAS, decode_float8, decode_int4, decode_int8, look_up
from pallas_kernels.quantized_matmul.config import Tiles
from pallas_kernels.quantized_matmul.operands import SCALES_A_BLOCK


@dataclass(frozen=True)
class KernelSpec:
    """What is fixed when the kernel is compiled.

    Attributes:
        tiles: sizes.
        num_tokens, num_out, channels: M, N of the result, K.
        bits, group: of the weights.
        code_dtype: of the codes.
        has_offset, has_table: whether there is an offset, or a codebook.
        dtype: of x, and of the products unless `act_dtype` is.
        weights_first: whether weights are the first operand of products with many tokens. Hopper takes that one from
            registers; before it, the second is the one that fewer warps decode each for itself.
        interpret: whether the kernel is interpreted, which knows no PTX.
        has_scale_table: whether scales are codes.
        has_order: whether x's channels are read in an order of their own.
        has_norm: whether x is normalised first.
        epsilon: of the norm.
        activation: what gates: then the weights have twice the result's rows, those that gate first.
        act_dtype: "int8" or "float8_e4m3fn", that rows of x are rounded to, or None.
        num_maxima: of the maxima of |x| that are given for each row of x; 0 for none.
        gives_maxima: whether the largest magnitudes of the result's rows, of each tile, are a second result.
    """

    tiles: Tiles
    num_tokens: int
    num_out: int
    channels: int
    bits: int
    group: int
    code_dtype: Any
    has_offset: bool
    has_table: bool
    dtype: Any
    weights_first: bool
    interpret: bool
    has_scale_table: bool = False
    has_order: bool = False
    has_norm: bool = False
    epsilon: float = 0.0
    activation: str | None = None
    act_dtype: str | None = None
    num_maxima: int = 0
    gives_maxima: bool = False

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

    @property
    def shifted(self) -> bool:
        """Whether something is added to code times scale."""
        return self.has_offset or self.bias != 0

    @property
    def counts_squares(self) -> bool:
        """Whether the sums of x's squares are not given."""
        return self.has_norm and self.act_dtype is None

    @property
    def parts(self) -> tuple[int, ...]:
        """First rows of the weights that the result's first row is made of."""
        return (0,) if self.activation is None else (0, self.num_out)


@dataclass(frozen=True)
class Refs:
    """References to the operands; None for those that there are not."""

    x: Any
    codes: Any
    scale: Any
    offset: Any
    codebook: Any
    scale_table: tuple[Any, ...] | None
    order: Any
    norm: Any
    maxima: Any
    squares: Any
    out: Any
    out_maxima: Any


@dataclass(frozen=True)
class Place:
    """Rows of x and of the result in the tile; past the last one, that one again."""

    tokens: jax.Array
    outs: jax.Array
    out_start: jax.Array


def refs_of(spec: KernelSpec, refs: tuple[Any, ...]) -> Refs:
    """References in the order of the kernel's operands, the results last."""
    given = iter(refs)
    x, codes, scale = next(given), next(given), next(given)
    offset = next(given) if spec.has_offset else None
    codebook = next(given) if spec.has_table else None
    scale_table = (next(given), next(given), next(given)) if spec.has_scale_table else None
    there = (
        spec.has_order,
        spec.has_norm,
        spec.num_maxima > 0,
        spec.has_norm and not spec.counts_squares,
    )
    order, norm, maxima, squares = (next(given) if is_there else None for is_there in there)
    results = next(given), next(given, None)
    return Refs(x, codes, scale, offset, codebook, scale_table, order, norm, maxima, squares, *results)


def load_x(spec: KernelSpec, refs: Refs, place: Place, index: jax.Array) -> jax.Array:
    """[tokens, into]."""
    inside = pl.ds(index * spec.tiles.into, spec.tiles.into)
    if refs.order is None:
        return refs.x[place.tokens, inside]
    return refs.x[place.tokens[:, None], refs.order[inside][None, :]]


def load_norm(spec: KernelSpec, refs: Refs, index: jax.Array) -> jax.Array:
    """float32[into], the norm's scale."""
    inside = pl.ds(index * spec.tiles.into, spec.tiles.into)
    scale = refs.norm[inside] if refs.order is None else refs.norm[refs.order[inside]]
    return scale.astype(jnp.float32)


def decoded(spec: KernelSpec, refs: Refs, place: Place, table: Any, index: jax.Array, first: int = 0) -> jax.Array:
    """[out, into]: entries of the table, or codes that are `spec.bias` too high, of the weights' rows from `first`."""
    width = spec.tiles.into // 2 if spec.bits == 4 else spec.tiles.into
    whole = spec.num_out % spec.tiles.out == 0
    rows = pl.ds(first + place.out_start, spec.tiles.out) if whole else first + place.outs
    codes = refs.codes[rows, pl.ds(index * width, width)]
    if spec.act_dtype is not None:
        return codes
    if spec.bits == 8:
        decode = decode_int8 if spec.code_dtype == jnp.int8 else decode_float8
        return decode(codes, spec.dtype, spec.interpret)
    if table is None:
        pair = decode_int4(codes, spec.dtype, spec.interpret)
    else:
        pair = look_up(codes, table, spec.dtype, spec.interpret)
    return jnp.stack(pair, axis=2).reshape(spec.tiles.out, spec.tiles.into)


def factors(
    spec: KernelSpec, refs: Refs, place: Place, index: jax.Array, first: int = 0
) -> tuple[jax.Array, jax.Array]:
    """float32[out], twice: the scale of a tile of channels, and what is added to code times scale."""
    group = lax.div(index * spec.tiles.into, spec.group) if spec.grouped else jnp.int32(0)
    rows = first + place.outs
    scale = _scales(spec, refs, rows, group)
    shift = scale * -float(spec.bias)
    if spec.has_offset:
        shift = shift + refs.offset[rows, group].astype(jnp.float32)
    return scale, shift


def _scales(spec: KernelSpec, refs: Refs, rows: jax.Array, group: jax.Array) -> jax.Array:
    """float32[out]."""
    stored = refs.scale[rows, group]
    if refs.scale_table is None:
        return stored.astype(jnp.float32)
    book, blocks, offset = refs.scale_table
    index = rows * (spec.channels // spec.group) + group
    values = book[stored.astype(jnp.int32)] * blocks[lax.div(index, SCALES_A_BLOCK)]
    return values + offset[jnp.zeros_like(index)]
