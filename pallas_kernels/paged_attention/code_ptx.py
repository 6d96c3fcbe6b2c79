"""KV codes to bfloat16 in a few instructions for four of them, where Triton's own conversions take several times more.

Every code is a bfloat16 number exactly. The trick is that of Kim et al. (arXiv:2211.10017): bits are put where they
make a number of a known exponent, which one fused multiply-add brings to the right one. No conversion instruction is
needed, so that e4m3 works before compute capability 8.9, too.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

# One register of four bytes in ($2), two registers of two bfloat16 each out. 0x43 above a byte n < 128 makes 128 + n;
# 0x3F80 is 1, 0xC308 is -136.
_NIBBLES = """
{{
    .reg .b32 nibbles, one, less;
    {shift}
    xor.b32 nibbles, nibbles, 0x88888888;
    and.b32 nibbles, nibbles, 0x0F0F0F0F;
    mov.b32 one, 0x3F803F80;
    mov.b32 less, 0xC308C308;
    prmt.b32 $0, nibbles, 0x43434343, 0x4140;
    prmt.b32 $1, nibbles, 0x43434343, 0x4342;
    fma.rn.bf16x2 $0, $0, one, less;
    fma.rn.bf16x2 $1, $1, one, less;
}}
"""
# A byte above which 0x43 stands is 128 + its low seven bits, and its high bit, in the exponent, says 128 or 256.
_INT8 = """
{
    .reg .b32 low, high, one, less;
    prmt.b32 low, $2, 0x43434343, 0x4140;
    prmt.b32 high, $2, 0x43434343, 0x4342;
    mov.b32 one, 0x3F803F80;
    and.b32 less, low, 0x43804380;
    or.b32 less, less, 0x80008000;
    and.b32 low, low, 0xFF7FFF7F;
    fma.rn.bf16x2 $0, low, one, less;
    and.b32 less, high, 0x43804380;
    or.b32 less, less, 0x80008000;
    and.b32 high, high, 0xFF7FFF7F;
    fma.rn.bf16x2 $1, high, one, less;
}
"""

_LOW_NIBBLES = _NIBBLES.format(shift="mov.b32 nibbles, $2;")
_HIGH_NIBBLES = _NIBBLES.format(shift="shr.b32 nibbles, $2, 4;")

# Exponent and mantissa move to where bfloat16 has them, which leaves the exponent 127 - 7 too low: 0x7B80 is 2^120.
_E4M3 = """
{
    .reg .b32 low, high, scale, zero, sign;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    mov.b32 scale, 0x7B807B80;
    mov.b32 zero, 0x80008000;
    and.b32 sign, low, zero;
    and.b32 low, low, 0x7F007F00;
    shr.b32 low, low, 4;
    or.b32 low, low, sign;
    and.b32 sign, high, zero;
    and.b32 high, high, 0x7F007F00;
    shr.b32 high, high, 4;
    or.b32 high, high, sign;
    fma.rn.bf16x2 $0, low, scale, zero;
    fma.rn.bf16x2 $1, high, scale, zero;
}
"""


def decode(codes: jax.Array, interpret: bool) -> jax.Array:
    """int8 or float8 codes, or what is none, in a dtype that products take."""
    if interpret:
        return codes
    if codes.dtype == jnp.int8:
        return _to_bfloat16(_INT8, codes)
    if codes.dtype == jnp.float8_e4m3fn:
        return _to_bfloat16(_E4M3, lax.bitcast_convert_type(codes, jnp.int8))
    return codes


def decode_int4(packed: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """bfloat16 of the low and of the high nibbles of uint8."""
    if not interpret:
        return _to_bfloat16(_LOW_NIBBLES, packed), _to_bfloat16(_HIGH_NIBBLES, packed)
    signed = lax.bitcast_convert_type(packed, jnp.int8)
    low = lax.shift_right_arithmetic(lax.shift_left(signed, jnp.int8(4)), jnp.int8(4))
    return low.astype(jnp.bfloat16), lax.shift_right_arithmetic(signed, jnp.int8(4)).astype(jnp.bfloat16)


def _to_bfloat16(asm: str, codes: jax.Array) -> jax.Array:
    # XLA's Triton takes a join of two results of 16-bit instructions on packs of four for one of its own making, whose
    # numbers lie in another order, and mixes ours up. It does not look through a change of type.
    shape: Any = jax.ShapeDtypeStruct(codes.shape, jnp.int16)
    [result] = plt.elementwise_inline_asm(asm, args=[codes], constraints="=r,=r,r", pack=4, result_shape_dtypes=[shape])
    return lax.bitcast_convert_type(result, jnp.bfloat16)
