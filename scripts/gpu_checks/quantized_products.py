"""Products with packed weights, behind them the bfloat16 product of the same shape: part of the stage `products`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.runner.programs import GPU_OPTIONS
from pallas_kernels.quantized_matmul import dequantize, quantized_matmul
from scripts.gpu_checks.case import Case, CheckFailed, Compiled, Program
from scripts.gpu_checks.pools import SEED, random_values
from scripts.gpu_checks.session import Session
from scripts.gpu_checks.tolerance import UNIT_ROUNDOFF, relative_error

SAMPLE_SECONDS = 0.03
CALLS = 8
SETS = 4
"""Of weights, by turns: together they are larger than any L2."""


@dataclass(frozen=True)
class Packed:
    """M tokens through weights [N, K]; bits 16 are bfloat16.

    `codes`: dtype of 8 bits. `rounds`: whether x is rounded to it, too. `xla`: by XLA's product, not by our kernel.
    """

    tokens: int
    bits: int
    group: int = 128
    kind: str = "offset"
    channels: int = 4096
    out: int = 14336
    codes: str = "int8"
    rounds: bool = False
    xla: bool = False

    @property
    def name(self) -> str:
        if self.bits == 16:
            return f"bf16 M{self.tokens}"
        bits = f"W{self.bits}A{8 if self.rounds else 16}{' e4m3' if self.codes != 'int8' else ''}"
        by = " by XLA" if self.xla else ""
        return f"{bits} g{self.group} {self.kind or 'scale'} M{self.tokens}{by}"

    @property
    def goal(self) -> float | None:
        """How many times as fast as bfloat16 it shall be."""
        if self.bits != 4:
            return None
        return 3.0 if self.tokens <= 16 else 0.9 if self.tokens >= 4096 else None

    @property
    def num_bytes(self) -> int:
        """What one call must move."""
        numbers = self.out * self.channels
        factors = 0 if self.bits == 16 else 4 * numbers // self.group * (2 if self.kind == "offset" else 1)
        return numbers * self.bits // 8 + factors + 2 * self.tokens * (self.channels + self.out)


EIGHT_BITS = ("int8", "float8_e4m3fn")
SHAPES = (
    *(Packed(tokens, bits) for tokens in (1, 16, 64, 512, 4096) for bits in (16, 4)),
    *(Packed(tokens, 4, 64, "table") for tokens in (16, 4096)),
    *(Packed(tokens, 8, 32, "") for tokens in (16, 4096)),
    *(Packed(tokens, 8, 4096, "") for tokens in (1, 16)),
    *(Packed(tokens, 8, 4096, "", codes=codes, xla=True) for codes in EIGHT_BITS for tokens in (1, 16, 4096)),
    *(
        Packed(tokens, 8, 4096, "", codes=codes, rounds=True, xla=tokens > 32)
        for codes in EIGHT_BITS
        for tokens in (1, 16, 4096)
    ),
    *(Packed(tokens, 8, 128, "", codes="float8_e4m3fn") for tokens in (16, 4096)),
)
REHEARSAL = (
    Packed(3, 16, channels=64, out=96),
    Packed(3, 4, 32, channels=64, out=96),
    Packed(3, 8, 64, "", 64, 96, "float8_e4m3fn", xla=True),
    Packed(3, 8, 64, "", 64, 96, rounds=True),
)


def cases(session: Session) -> list[Case]:
    """Llama-3-8B's gate and up projections."""
    return [packed_case(session, packed) for packed in (REHEARSAL if session.options.rehearse else SHAPES)]


def packed_case(session: Session, packed: Packed) -> Case:
    """One shape, as a case of the stage."""

    def run(x: jax.Array, weights: tuple[Any, ...]) -> jax.Array:
        for index in range(CALLS):
            x = _multiply(packed, session.implementation, x, weights[index % SETS])[:, : packed.channels]
        return x

    def make(seed: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
        x = random_values((packed.tokens, packed.channels), jnp.bfloat16, seed)
        return x, tuple(_weights(packed, seed + turn) for turn in range(1, 1 + SETS))

    shapes = jax.eval_shape(make, SEED)
    converts = packed.xla and not packed.rounds  # by the products that the engine has XLA make then
    options = dict(GPU_OPTIONS) | ({"xla_gpu_enable_triton_gemm": True} if converts else {})
    jitted = jax.jit(run, donate_argnums=0, compiler_options=options)
    programs = (
        Program(f"products {packed.name}", jitted, shapes),
        Program(f"products inputs {packed.name}", jax.jit(make), (SEED,)),
    )
    return Case(
        "products",
        packed.name,
        partial(_run, packed),
        programs,
        kernel=None if packed.bits == 16 or packed.xla else "quantized_matmul",
        num_bytes=(SETS + 1) * packed.num_bytes,
        facts={"tokens": packed.tokens, "channels": packed.channels, "out": packed.out}
        | ({} if packed.goal is None else {"goal": packed.goal}),
    )


def _weights(packed: Packed, seed: jax.Array) -> tuple[jax.Array, ...]:
    """Codes and what goes with them, or bfloat16: of a size that a product leaves x as large as it was."""
    shape, size = (packed.out, packed.channels), packed.channels**-0.5
    if packed.bits == 16:
        return ((random_values(shape, jnp.float32, seed) * (1.7 * size)).astype(jnp.bfloat16),)
    groups = (packed.out, packed.channels // packed.group)
    if packed.bits == 8:
        codes = random_values(shape, jnp.dtype(packed.codes), seed)
        return codes, jnp.full(groups, size / (74 if packed.codes == "int8" else 4.6), jnp.float32)
    codes = random_values((packed.out, packed.channels // 2), jnp.uint8, seed)
    if packed.kind == "table":
        return codes, jnp.full(groups, size, jnp.float32), jnp.linspace(-1.6, 1.6, 16, dtype=jnp.float32)
    return codes, jnp.full(groups, size / 4.6, jnp.float32), jnp.full(groups, -7.5 * size / 4.6, jnp.float32)


def _multiply(packed: Packed, implementation: str, x: jax.Array, weights: tuple[jax.Array, ...]) -> jax.Array:
    if packed.bits == 16:
        return lax.dot_general(x, weights[0], (((1,), (1,)), ((), ())))
    codes, scale, *extra = weights
    named = {"codebook" if packed.kind == "table" else "offset": extra[0]} if extra else {}
    options: dict[str, Any] = {"bits": packed.bits, "group": packed.group, **named}
    if packed.rounds:
        options["act_dtype"] = packed.codes
    result: jax.Array = quantized_matmul(
        x, codes, scale, implementation="xla" if packed.xla else implementation, **options
    )
    return result


def _run(packed: Packed, session: Session, programs: Sequence[Compiled]) -> dict[str, Any]:
    run, make = programs
    x, weights = make(jnp.int32(12))
    first = np.asarray(x[0]).astype(np.float64)
    x = run(x, weights)
    error = _error(packed, first, weights, np.asarray(x[0]))
    # Rounding x to bfloat16 between the products moves some of its codes to their neighbours.
    step = {"int8": 1 / 127, "float8_e4m3fn": 1 / 16}[packed.codes] if packed.rounds else 0.0
    if not error <= CALLS * (2 * UNIT_ROUNDOFF["bfloat16"] + step / 2):
        raise CheckFailed(f"relative error {error:.3g} after {CALLS} products, against float64", error=error)
    timing = session.time(lambda x: run(x, weights), x, operations=CALLS, sample_seconds=SAMPLE_SECONDS)
    rates = session.share_of_bandwidth(packed.num_bytes, timing.seconds) | {"error": error}
    if session.options.claims_times:
        rates["tflop_per_s"] = 2e-12 * packed.tokens * packed.channels * packed.out / timing.seconds
    return timing.values(session.options.claims_times) | rates


def _error(packed: Packed, x: np.ndarray, weights: tuple[Any, ...], out: np.ndarray) -> float:
    """Of one token."""
    rows = slice(packed.channels)
    for index in range(CALLS):
        if packed.bits == 16:
            wide = weights[index % SETS][0][rows]
        else:
            codes, scale, *extra = weights[index % SETS]
            table = extra[0] if packed.kind == "table" else None
            offset = extra[0][rows] if packed.kind == "offset" else None
            wide = dequantize(codes[rows], scale[rows], offset, table, bits=packed.bits)
        if packed.rounds:
            x = _rounded(x, packed.codes)
        x = np.asarray(wide).astype(np.float64) @ x
    return relative_error(out.astype(np.float64), x)


def _rounded(x: np.ndarray, codes: str) -> np.ndarray:
    """A row on the grid of a code's dtype."""
    scale = np.abs(x).max() / (127 if codes == "int8" else 448)
    grid = np.rint(x / scale) if codes == "int8" else (x / scale).astype(np.float32).astype(jnp.dtype(codes))
    return grid.astype(np.float64) * scale
