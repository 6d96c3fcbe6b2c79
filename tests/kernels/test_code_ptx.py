"""The instructions that decode KV codes, carried out one by one for every code there is."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.paged_attention import code_ptx


def lanes(register: int) -> np.ndarray:
    return np.array([register & 0xFFFF, register >> 16], np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)


def permute(low: int, high: int, selector: int) -> int:
    data = low.to_bytes(4, "little") + high.to_bytes(4, "little")
    return int.from_bytes(bytes(data[(selector >> 4 * i) & 7] for i in range(4)), "little")


def fused(a: int, b: int, c: int) -> int:
    low, high = (lanes(a) * lanes(b) + lanes(c)).astype(ml_dtypes.bfloat16).view(np.uint16)
    return int(low) | int(high) << 16


OPERATIONS: dict[str, Any] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.b32": lambda a, b: a >> b,
    "prmt.b32": permute,
    "fma.rn.bf16x2": fused,
}


def execute(ptx: str, codes: bytes) -> np.ndarray:
    """What four codes in register $2 leave in $0 and $1, as float64."""
    registers = {"$2": int.from_bytes(codes, "little")}
    for line in ptx.strip().strip("{}").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        target, *sources = (part.strip() for part in rest.split(","))
        registers[target] = OPERATIONS[name](*(registers[s] if s in registers else int(s, 0) for s in sources))
    return np.concatenate([lanes(registers["$0"]), lanes(registers["$1"])])


ALL = np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize(
    ("ptx", "expected"),
    [
        (code_ptx._INT8, ALL.view(np.int8)),
        (code_ptx._E4M3, ALL.view(ml_dtypes.float8_e4m3fn)),
        (code_ptx._LOW_NIBBLES, ((ALL & 15) ^ 8).astype(int) - 8),
        (code_ptx._HIGH_NIBBLES, ((ALL >> 4) ^ 8).astype(int) - 8),
    ],
    ids=["int8", "e4m3", "int4 low", "int4 high"],
)
def test_every_code(ptx: str, expected: np.ndarray) -> None:
    """Neighbours differ, so that a byte from the wrong place shows; e4m3 also has NaN, which no pool holds."""
    order = np.random.default_rng(0).permutation(256)
    got = np.concatenate([execute(ptx, ALL[order[i : i + 4]].tobytes()) for i in range(0, 256, 4)])
    wanted = expected.astype(np.float64)[order]
    real = ~np.isnan(wanted)
    np.testing.assert_array_equal(got[real], wanted[real])


def test_no_instructions_are_joined() -> None:
    """XLA's Triton joins results of packs of four in an order of its own: there must be something in between."""
    jaxpr = jax.make_jaxpr(lambda packed: code_ptx.decode_int4(packed, False))(jnp.zeros((4, 8), jnp.uint8)).jaxpr
    makers = {str(out): equation.primitive.name for equation in jaxpr.eqns for out in equation.outvars}
    assert any("inline_asm" in name for name in makers.values())
    assert {makers[str(out)] for out in jaxpr.outvars} == {"bitcast_convert_type"}
