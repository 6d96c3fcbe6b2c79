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
    """M tokens through weights [N, K]; bits 16 are bfloat16."""

    tokens: int
    bits: int
    group: int = 128
    kind: str = "offset"
    channels: int = 4096
    out: int = 14336

    @property
    def name(self) -> str:
        weights = "bf16" if self.bits == 16 else f"W{self.bits}A16 g{self.group} {self.kind or 'scale'}"
        return f"{weights} M{self.tokens}"

    @property
    def num_bytes(self) -> int:
        """What one call must move."""
        numbers = self.out * self.channels
        factors = 0 if self.bits == 16 else 4 * numbers // self.group * (2 if self.kind == "offset" else 1)
        return numbers * self.bits // 8 + factors + 2 * self.tokens * (self.channels + self.out)


SHAPES = (
    *(Packed(tokens, bits) for tokens in (1, 16, 64, 512, 4096) for bits in (4, 16)),
    *(Packed(tokens, 4, 64, "table") for tokens in (16, 4096)),
    *(Packed(tokens, 8, 32, "") for tokens in (16, 4096)),
    Packed(16, 8, 4096, ""),
)
REHEARSAL = (Packed(3, 4, 32, channels=64, out=96), Packed(3, 16, channels=64, out=96))


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
    jitted = jax.jit(run, donate_argnums=0, compiler_options=dict(GPU_OPTIONS))
    programs = (
        Program(f"products {packed.name}", jitted, shapes),
        Program(f"products inputs {packed.name}", jax.jit(make), (SEED,)),
    )
    return Case(
        "products",
        packed.name,
        partial(_run, packed),
        programs,
        kernel=None if packed.bits == 16 else "quantized_matmul",
        num_bytes=(SETS + 1) * packed.num_bytes,
        facts={"tokens": packed.tokens, "channels": packed.channels, "out": packed.out},
    )


def _weights(packed: Packed, seed: jax.Array) -> tuple[jax.Array, ...]:
    """Codes and what goes with them, or bfloat16: of a size that a product leaves x as large as it was."""
    shape, size = (packed.out, packed.channels), packed.channels**-0.5
    if packed.bits == 16:
        return ((random_values(shape, jnp.float32, seed) * (1.7 * size)).astype(jnp.bfloat16),)
    groups = (packed.out, packed.channels // packed.group)
    if packed.bits == 8:
        return random_values(shape, jnp.int8, seed), jnp.full(groups, size / 74, jnp.float32)
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
    return quantized_matmul(x, codes, scale, implementation=implementation, **options)


def _run(packed: Packed, session: Session, programs: Sequence[Compiled]) -> dict[str, Any]:
    run, make = programs
    x, weights = make(jnp.int32(12))
    first = np.asarray(x[0]).astype(np.float64)
    x = run(x, weights)
    error = _error(packed, first, weights, np.asarray(x[0]))
    if not error <= CALLS * 2 * UNIT_ROUNDOFF["bfloat16"]:
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
        x = np.asarray(wide).astype(np.float64) @ x
    return relative_error(out.astype(np.float64), x)
