"""What PTX's instructions compute from registers, which are uint64 arrays of bits, one element a thread."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Bits = np.ndarray


def unsigned(value: Any) -> Bits:
    return np.asarray(value).astype(np.int64).view(np.uint64)


def signed(value: Bits, width: int = 32) -> np.ndarray:
    shift = 64 - width
    return (value << np.uint64(shift)).view(np.int64) >> shift


def floats(value: Bits) -> np.ndarray:
    return value.astype(np.uint32).view(np.float32)


def bits_of(value: np.ndarray) -> Bits:
    return value.astype(np.float32).view(np.uint32).astype(np.uint64)


def halves(value: Bits, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """float32 of the lower and the upper number of a register."""
    low, high = ((value >> np.uint64(s) & np.uint64(0xFFFF)).astype(np.uint16).view(dtype) for s in (0, 16))
    return low.astype(np.float32), high.astype(np.float32)


def pair(low: np.ndarray, high: np.ndarray, dtype: Any) -> Bits:
    low, high = (part.astype(dtype).view(np.uint16).astype(np.uint64) for part in (low, high))
    return low | high << np.uint64(16)


def float8_pair(low: np.ndarray, high: np.ndarray) -> Bits:
    """float8_e4m3fn of numbers up to 448."""
    low, high = (part.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(np.uint64) for part in (low, high))
    return low | high << np.uint64(8)


def float8_numbers(value: Bits) -> tuple[np.ndarray, np.ndarray]:
    low, high = ((value >> np.uint64(s) & np.uint64(0xFF)).astype(np.uint8) for s in (0, 8))
    return tuple(part.view(ml_dtypes.float8_e4m3fn).astype(np.float32) for part in (low, high))  # type: ignore[return-value]


def toward_zero(value: np.ndarray) -> np.ndarray:
    """The next float16 towards zero, of numbers in its normal range."""
    return (value.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def in_pairs(operation: Callable[..., np.ndarray], dtype: Any, *values: Bits) -> Bits:
    low, high = zip(*(halves(value, dtype) for value in values), strict=True)
    return pair(operation(*low), operation(*high), dtype)


def permute(low: Bits, high: Bits, selector: Bits) -> Bits:
    source, result = low | high << np.uint64(32), np.zeros_like(low)
    for place in range(4):
        nibble = selector >> np.uint64(4 * place) & np.uint64(15)
        byte = source >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        byte = np.where(nibble < 8, byte, np.where(byte < 128, np.uint64(0), np.uint64(255)))
        result |= byte << np.uint64(8 * place)
    return result


def any_logic(a: Bits, b: Bits, c: Bits, table: Bits) -> Bits:
    result = np.zeros_like(a)
    for case in range(8):
        if int(table[0]) >> case & 1:
            chosen = (value if case & bit else ~value for value, bit in ((a, 4), (b, 2), (c, 1)))
            result |= next(chosen) & next(chosen) & next(chosen)
    return result


def field(value: Bits, place: Bits, width: Bits) -> Bits:
    return value >> place & (np.uint64(1) << width) - np.uint64(1)


BFLOAT16, FLOAT16 = ml_dtypes.bfloat16, np.float16
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add.s32": lambda a, b: a + b,
    "add.s64": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "neg.s32": lambda a: ~a + np.uint64(1),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "shl": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "shr.b32": lambda a, b: a >> b,
    "shr.b64": lambda a, b: a >> b,
    "shr.u64": lambda a, b: a >> b,
    "shr.s32": lambda a, b: unsigned(signed(a) >> b.view(np.int64)),
    "mul.wide.u32": lambda a, b: a * b,
    "mul.wide.s32": lambda a, b: unsigned(signed(a) * signed(b)),
    "mul.wide.s16": lambda a, b: unsigned(signed(a, 16) * signed(b, 16)),
    "mul.lo.s32": lambda a, b: a * b,
    "mad.lo.s32": lambda a, b, c: a * b + c,
    "div.s32": lambda a, b: unsigned(signed(a) // signed(b)),
    "rem.s32": lambda a, b: unsigned(signed(a) % signed(b)),
    "min.s32": lambda a, b: unsigned(np.minimum(signed(a), signed(b))),
    "max.s32": lambda a, b: unsigned(np.maximum(signed(a), signed(b))),
    "min.u": np.minimum,
    "bfe.u": field,
    "bfe.s32": lambda a, b, c: unsigned(signed(field(a, b, c), int(c[0]))),
    "prmt.b32": permute,
    "lop3.b32": any_logic,
    "selp": lambda a, b, c: np.where(c != 0, a, b),
    "fma.rn.f32": lambda a, b, c: bits_of(floats(a).astype(np.float64) * floats(b) + floats(c)),
    "mul.rn.f32": lambda a, b: bits_of(floats(a) * floats(b)),
    "add.rn.f32": lambda a, b: bits_of(floats(a) + floats(b)),
    "sub.rn.f32": lambda a, b: bits_of(floats(a) - floats(b)),
    "sub.f16x2": lambda a, b: in_pairs(lambda x, y: x - y, FLOAT16, a, b),
    "fma.rn.bf16x2": lambda a, b, c: in_pairs(lambda x, y, z: x * y + z, BFLOAT16, a, b, c),
    "fma.rn.bf16": lambda a, b, c: in_pairs(lambda x, y, z: x * y + z, BFLOAT16, a, b, c) & np.uint64(0xFFFF),
    "mul.rn.bf16": lambda a, b: in_pairs(lambda x, y: x * y, BFLOAT16, a, b) & np.uint64(0xFFFF),
    "rsqrt.approx.f32": lambda a: bits_of(1 / np.sqrt(floats(a).astype(np.float64))),
    "rsqrt.approx.ftz.f32": lambda a: bits_of(1 / np.sqrt(floats(a).astype(np.float64))),
    "div.full.f32": lambda a, b: bits_of(floats(a).astype(np.float64) / floats(b)),
    "min.f32": lambda a, b: bits_of(np.fmin(floats(a), floats(b))),
    "max.f32": lambda a, b: bits_of(np.fmax(floats(a), floats(b))),
    "max.NaN.f32": lambda a, b: bits_of(np.maximum(floats(a), floats(b))),
    "cvt.f32.bf16": lambda a: bits_of(halves(a, BFLOAT16)[0]),
    "cvt.rn.f32.s32": lambda a: bits_of(signed(a).astype(np.float64)),
    "cvt.rn.satfinite.e4m3x2.f32": lambda a, b: float8_pair(floats(b), floats(a)),
    "cvt.rz.f16.f32": lambda a: pair(toward_zero(floats(a)), np.zeros(len(a)), FLOAT16),
    "cvt.rn.satfinite.e4m3x2.f16x2": lambda a: float8_pair(*halves(a, FLOAT16)),
    "cvt.rn.f16x2.e4m3x2": lambda a: pair(*float8_numbers(a), FLOAT16),
    "cvt.f32.f16": lambda a: bits_of(halves(a, FLOAT16)[0]),
    "cvt.rn.bf16.f32": lambda a: pair(floats(a), np.zeros(len(a)), BFLOAT16),
    "cvt.rn.f16.f32": lambda a: pair(floats(a), np.zeros(len(a)), FLOAT16),
    "cvt.rn.bf16x2.f32": lambda a, b: pair(floats(b), floats(a), BFLOAT16),
    "cvt.s64.s32": lambda a: unsigned(signed(a)),
    "cvt.s32.s16": lambda a: unsigned(signed(a, 16)),
    "cvt.u32": lambda a: a,
    "cvt.u64.u32": lambda a: a,
    "cvt.u16.u32": lambda a: a & np.uint64(0xFFFF),
    "cvta": lambda a: a,
}
"""By how an opcode begins. Results of 32 bits are cut to them afterwards."""
