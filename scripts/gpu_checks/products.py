"""Stage `products`: the gated projections of a decode step, by our kernel and by XLA, as a share of the bandwidth.

Behind them products with packed weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.runner.programs import GPU_OPTIONS
from pallas_kernels.gated_matmul import norm_gated_matmul
from scripts.gpu_checks import quantized_products
from scripts.gpu_checks.case import Case, Compiled, Program
from scripts.gpu_checks.pools import SEED, random_values
from scripts.gpu_checks.session import Session

SAMPLE_SECONDS = 0.03
CALLS = 8
"""Of a program, by turns with two sets of weights; each is larger than any L2."""


@dataclass(frozen=True)
class Gated:
    """T tokens through the gate and up projections, ``[2, F, D]`` in bfloat16."""

    tokens: int
    channels: int
    out: int

    @property
    def num_bytes(self) -> int:
        """What one call must move."""
        return 2 * (2 * self.out * self.channels + self.tokens * (self.channels + self.out))


SHAPES = (Gated(1, 4096, 14336), Gated(32, 4096, 14336), Gated(64, 4096, 14336))
REHEARSAL = (Gated(3, 64, 96),)


def cases(session: Session) -> list[Case]:
    """Llama-3-8B's, with XLA's version right behind ours."""
    shapes = REHEARSAL if session.options.rehearse else SHAPES
    gated_cases = [_case(session, gated, name) for gated in shapes for name in (session.implementation, "xla")]
    return gated_cases + quantized_products.cases(session)


def _case(session: Session, gated: Gated, implementation: str) -> Case:
    def run(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> jax.Array:
        scale = jnp.ones((gated.channels,), x.dtype)
        for index in range(CALLS):
            out = norm_gated_matmul(
                x, scale, weights[index % 2], epsilon=1e-5, activation="silu", implementation=implementation
            )
            x = out[:, : gated.channels]
        return x

    name = f"{'XLA' if implementation == 'xla' else 'norm_gated_matmul'} T{gated.tokens}"
    x = jax.ShapeDtypeStruct((gated.tokens, gated.channels), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((2, gated.out, gated.channels), jnp.bfloat16)
    jitted = jax.jit(run, donate_argnums=0, compiler_options=dict(GPU_OPTIONS))

    def make(seed: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        pair = (random_values(weights.shape, weights.dtype, seed + turn) * 0.02 for turn in (1, 2))
        return random_values(x.shape, x.dtype, seed), tuple(part.astype(weights.dtype) for part in pair)

    programs = (
        Program(f"products {name}", jitted, (x, (weights, weights))),
        Program(f"products inputs T{gated.tokens}", jax.jit(make), (SEED,)),
    )
    return Case(
        "products",
        name,
        partial(_run, gated),
        programs,
        kernel=None if implementation == "xla" else "norm_gated_matmul",
        num_bytes=3 * gated.num_bytes,
        facts={"tokens": gated.tokens, "channels": gated.channels, "out": gated.out},
    )


def _run(gated: Gated, session: Session, programs: Sequence[Compiled]) -> dict[str, Any]:
    run, make = programs
    x, weights = make(jnp.int32(12))
    timing = session.time(lambda x: run(x, weights), x, operations=CALLS, sample_seconds=SAMPLE_SECONDS)
    rates = session.share_of_bandwidth(gated.num_bytes, timing.seconds)
    return timing.values(session.options.claims_times) | rates
