"""The instructions that decode weights, carried out one by one for every code there is, and what becomes of results."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels.quantized_matmul import code_ptx

NUMBERS: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def halves(register: int, dtype: str) -> list[float]:
    pair = np.array([register & 0xFFFF, register >> 16], np.uint16)
    return [float(number) for number in pair.view(NUMBERS[dtype])]


def permute(low: int, high: int, selector: int) -> int:
    data = low.to_bytes(4, "little") + high.to_bytes(4, "little")
    nibbles = [selector >> 4 * i & 0xF for i in range(4)]
    assert all(nibble < 8 for nibble in nibbles), "the eighth bit would spread a sign"
    return int.from_bytes(bytes(data[nibble] for nibble in nibbles), "little")


def subtract(a: int, b: int) -> int:
    pair = np.array(halves(a, "float16"), np.float16) - np.array(halves(b, "float16"), np.float16)
    low, high = (int(number) for number in pair.view(np.uint16))
    return low | high << 16


def any_logic(a: int, b: int, c: int, table: int) -> int:
    bits = ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1 for i in range(32))
    return sum((table >> bit & 1) << i for i, bit in enumerate(bits))


OPERATIONS: dict[str, Any] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.b32": lambda a, b: a >> b,
    "prmt.b32": permute,
    "lop3.b32": any_logic,
    "sub.f16x2": subtract,
}


def execute(ptx: str, registers: dict[str, int], results: int) -> list[int]:
    """What is left in the first registers."""
    registers = dict(registers)
    for line in ptx.strip().strip("{}").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        target, *sources = (part.strip() for part in rest.split(","))
        registers[target] = OPERATIONS[name](*(registers[s] if s in registers else int(s, 0) for s in sources))
    return [registers[f"${index}"] for index in range(results)]


def decoded(ptx: str, dtype: str, words: list[int], results: int) -> np.ndarray:
    """All bytes, in an order in which neighbours differ, so that one from the wrong place shows: [256, numbers]."""
    order = np.random.default_rng(0).permutation(256).astype(np.uint8)
    numbers = np.empty((256, results // 2))
    for first in range(0, 256, 4):
        four = order[first : first + 4]
        registers = {f"${results}": int.from_bytes(four.tobytes(), "little")}
        registers |= {f"${results + 1 + 4 * i}": word for i, word in enumerate(words)}
        left = [halves(register, dtype) for register in execute(ptx, registers, results)]
        numbers[four] = np.array(left).reshape(4, -1)
    return numbers


BYTES = np.arange(256)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_nibbles(dtype: str) -> None:
    """The low one comes first, in the register of its byte."""
    ptx = code_ptx.NIBBLES_BFLOAT16 if dtype == "bfloat16" else code_ptx.NIBBLES_FLOAT16
    bias = code_ptx.BIAS if dtype == "bfloat16" else 0
    expected = np.stack([BYTES % 16, BYTES // 16], axis=1) + bias
    np.testing.assert_array_equal(decoded(ptx, dtype, [], 4), expected)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_table(dtype: str) -> None:
    entries = np.random.default_rng(1).standard_normal(16).astype(NUMBERS[dtype])
    table = jnp.asarray(entries.astype(np.float32))
    words = [int(np.uint32(word.item() & 0xFFFFFFFF)) for word in words_of(table, dtype)]
    expected = entries.astype(np.float64)[np.stack([BYTES % 16, BYTES // 16], axis=1)]
    np.testing.assert_array_equal(decoded(code_ptx.TABLE, dtype, words, 4), expected)


def words_of(table: jax.Array, dtype: str) -> list[np.ndarray]:
    """As the kernel makes them."""

    def kernel(table_ref: Any, out_ref: Any) -> None:
        for index, word in enumerate(code_ptx.load_table(table_ref, jnp.dtype(dtype), False)):
            out_ref[index] = word[0, 0]

    shape = jax.ShapeDtypeStruct((8,), jnp.int32)
    return list(np.asarray(pl.pallas_call(kernel, out_shape=shape, interpret=True)(table)))


def test_int8_to_float16() -> None:
    order = np.random.default_rng(0).permutation(256).astype(np.uint8)
    for first in range(0, 256, 4):
        four = order[first : first + 4]
        registers = {"$2": int.from_bytes(four.tobytes(), "little")}
        left = [halves(register, "float16") for register in execute(code_ptx.INT8_FLOAT16, registers, 2)]
        np.testing.assert_array_equal(np.concatenate(left), four.view(np.int8))


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("table", [False, True])
def test_no_instructions_are_joined(dtype: str, table: bool) -> None:
    """XLA's Triton joins what packs of four come to in an order of its own: there must be something in between."""
    packed, words = jnp.zeros((4, 8), jnp.uint8), (jnp.zeros((1, 1), jnp.int32),) * 8

    def function(packed: jax.Array, *words: jax.Array) -> Any:
        if table:
            return code_ptx.look_up(packed, words, jnp.dtype(dtype), False)
        return code_ptx.decode_int4(packed, jnp.dtype(dtype), False)

    jaxpr = jax.make_jaxpr(function)(packed, *words).jaxpr
    makers = {str(out): equation.primitive.name for equation in jaxpr.eqns for out in equation.outvars}
    assert any("inline_asm" in name for name in makers.values())
    assert {makers[str(out)] for out in jaxpr.outvars} == {"bitcast_convert_type"}
