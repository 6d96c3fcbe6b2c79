"""Weight codes to bfloat16 or float16 in a few instructions for four of them.

The trick is that of Kim et al. (arXiv:2211.10017): bits are put below those of a power of two, whose unit in the last
place is 1. A table of 16 entries lies in registers, bytes of its entries apart, and is looked up by byte permutation.

The two numbers of a byte come out in one register, as products take them, and are told apart by a shift that costs
nothing. Two results to be joined would need to be interleaved. Worse, XLA's Triton takes a join of what packs of four
come to for one of its own making, whose results lie in another order, and gives wrong numbers without a word.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.paged_attention.code_ptx import decode

BIAS = 128
"""What is left on 4-bit codes in bfloat16, of which 128 .. 143 are exact: a sum of x times it is as good as taking it
off each of them."""

# One register of four bytes in ($4), for each byte one of two numbers out: each nibble comes below {magic}.
NIBBLES = """
{{
    .reg .b32 high, mask, magic;
    shr.b32 high, $4, 4;
    mov.b32 mask, 0x000F000F;
    mov.b32 magic, {magic};
    prmt.b32 $0, $4, high, 0x0400;
    prmt.b32 $1, $4, high, 0x0501;
    prmt.b32 $2, $4, high, 0x0602;
    prmt.b32 $3, $4, high, 0x0703;
    lop3.b32 $0, $0, mask, magic, 0xEA;
    lop3.b32 $1, $1, mask, magic, 0xEA;
    lop3.b32 $2, $2, mask, magic, 0xEA;
    lop3.b32 $3, $3, mask, magic, 0xEA;
    {finish}
}}
"""
_TAKE_1024 = """
    sub.f16x2 $0, $0, magic;
    sub.f16x2 $1, $1, magic;
    sub.f16x2 $2, $2, magic;
    sub.f16x2 $3, $3, magic;
"""
NIBBLES_BFLOAT16 = NIBBLES.format(magic="0x43004300", finish="")
NIBBLES_FLOAT16 = NIBBLES.format(magic="0x64006400", finish=_TAKE_1024)
# One register of four bytes in ($2), two registers of two numbers each out. Codes and 128 more are 0 .. 255; 0x6480 is
# 1024 + 128.
INT8_FLOAT16 = """
{
    .reg .b32 bytes, less;
    xor.b32 bytes, $2, 0x80808080;
    mov.b32 less, 0x64806480;
    prmt.b32 $0, bytes, 0x64646464, 0x4140;
    prmt.b32 $1, bytes, 0x64646464, 0x4342;
    sub.f16x2 $0, $0, less;
    sub.f16x2 $1, $1, less;
}
"""
# Four nibbles are looked up at a time. A permutation takes three bits of each and eight bytes of the table; another one
# chooses between the table's halves by the fourth bit.
_LOOK_UP = """
    prmt.b32 below, {words[0]}, {words[1]}, three;
    prmt.b32 above, {words[2]}, {words[3]}, three;
    prmt.b32 {to}, below, above, fourth;
"""
_START = """
{
    .reg .b32 three, fourth, below, above, high, low;
    and.b32 three, $4, 0x77777777;
    shr.b32 fourth, $4, 1;
    lop3.b32 fourth, fourth, 0x44444444, 0x32103210, 0xEA;
"""
_NEXT_FOUR = """
    shr.b32 three, three, 16;
    shr.b32 fourth, fourth, 16;
"""


def _table_asm() -> str:
    """Eight words of the table behind the codes ($4), each four times: high bytes of the entries, then low ones."""
    high, low = ([f"${5 + 4 * word}" for word in range(first, first + 4)] for first in (0, 4))
    parts = [_START]
    for turn in (0, 1):
        parts += [_LOOK_UP.format(words=words, to=to) for words, to in ((high, "high"), (low, "low"))]
        parts += [f"prmt.b32 ${2 * turn}, low, high, 0x5140;", f"prmt.b32 ${2 * turn + 1}, low, high, 0x7362;"]
        parts += [_NEXT_FOUR] if turn == 0 else ["}\n"]
    return "\n".join(parts)


TABLE = _table_asm()


def decode_int8(codes: jax.Array, dtype: Any, interpret: bool) -> jax.Array:
    """int8 codes in `dtype`."""
    if interpret:
        return codes.astype(dtype)
    if dtype == jnp.bfloat16:
        return decode(codes, interpret)
    shape: Any = jax.ShapeDtypeStruct(codes.shape, dtype)
    [result] = plt.elementwise_inline_asm(
        INT8_FLOAT16, args=[codes], constraints="=r,=r,r", pack=4, result_shape_dtypes=[shape]
    )
    return result


def decode_float8(codes: jax.Array, dtype: Any, interpret: bool) -> jax.Array:
    """float8_e4m3fn codes in `dtype`; no instruction for these numbers is needed, which GPUs before 8.9 lack."""
    if interpret:
        return codes.astype(dtype)
    return decode(codes, interpret).astype(dtype)


def round_to_int8(x: jax.Array) -> jax.Array:
    """int8 of float32 between -127 and 127, to nearest, ties to even: below 1.5 times 2^23 a unit in the last place is
    1, and the low byte of the sum is the number."""
    shifted = x + jnp.float32(3 << 22)
    return lax.bitcast_convert_type(shifted, jnp.int32).astype(jnp.int8)


def decode_int4(packed: jax.Array, dtype: Any, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """The low and the high nibbles of uint8: plus `BIAS` in bfloat16, as they are in float16."""
    if interpret:
        bias = BIAS if dtype == jnp.bfloat16 else 0
        low, high = packed.astype(jnp.int32) & 0xF, packed.astype(jnp.int32) >> 4
        return (low + bias).astype(dtype), (high + bias).astype(dtype)
    return _pairs(NIBBLES_BFLOAT16 if dtype == jnp.bfloat16 else NIBBLES_FLOAT16, packed, (), dtype)


def load_table(codebook: Any, dtype: Any, interpret: bool) -> tuple[jax.Array, ...]:
    """A reference to float32[16] as `look_up` wants it: eight words [1, 1], or all entries where there is no PTX.

    They are arrays because Triton decodes before it brings the codes to where products take them where any operand of
    the decoding is a scalar, and what goes through shared memory then is four times as much.
    """
    if interpret:
        return (codebook[...].astype(dtype),)
    entries = [codebook[pl.ds(index, 1)][:, None].astype(dtype) for index in range(16)]
    bits = [lax.bitcast_convert_type(entry, jnp.int16).astype(jnp.int32) for entry in entries]
    return tuple(_word(bits[first : first + 4], shift) for shift in (8, 0) for first in range(0, 16, 4))


def _word(entries: Sequence[jax.Array], shift: int) -> jax.Array:
    """One byte of each of four entries."""
    parts = [((entry >> shift) & 0xFF) << (8 * index) for index, entry in enumerate(entries)]
    return functools.reduce(operator.or_, parts)


def look_up(
    packed: jax.Array, table: tuple[jax.Array, ...], dtype: Any, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Entries of the table for the low and the high nibbles of uint8."""
    if interpret:
        (entries,) = table
        return entries[packed.astype(jnp.int32) & 0xF], entries[packed.astype(jnp.int32) >> 4]
    return _pairs(TABLE, packed, table, dtype)


def fused_multiply_add(x: jax.Array, y: jax.Array, z: jax.Array, interpret: bool) -> jax.Array:
    """``x * y + z`` in float32, of arrays that broadcast; XLA keeps Triton from fusing it."""
    if interpret:
        return x * y + z
    shape = jnp.broadcast_shapes(x.shape, y.shape, z.shape)
    result: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
    args = [jnp.broadcast_to(array, shape) for array in (x, y, z)]
    [out] = plt.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;", args=args, constraints="=f,f,f,f", pack=1, result_shape_dtypes=[result]
    )
    return out


def _pairs(asm: str, packed: jax.Array, words: Sequence[jax.Array], dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Lower and upper halves of the registers that bytes come to."""
    shape: Any = jax.ShapeDtypeStruct(packed.shape, jnp.int32)
    constraints = ",".join(["=r"] * 4 + ["r"] * (1 + 4 * len(words)))
    args = [packed, *(jnp.broadcast_to(word, packed.shape) for word in words)]
    [pair] = plt.elementwise_inline_asm(asm, args=args, constraints=constraints, pack=4, result_shape_dtypes=[shape])
    halves = pair, lax.shift_right_logical(pair, 16)
    low, high = (lax.bitcast_convert_type(half.astype(jnp.int16), dtype) for half in halves)
    return low, high
