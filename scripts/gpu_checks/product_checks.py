"""Checks of the kernel that normalises, projects twice and gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_matmul import norm_gated_matmul
from scripts.gpu_checks.check import Check, Ratios
from scripts.gpu_checks.tolerance import UNIT_ROUNDOFF, relative_error, worst_row_error

EPSILON = 1e-5


@dataclass(frozen=True)
class Product:
    """T tokens of D channels to F, in bfloat16."""

    tokens: int
    channels: int
    out: int
    activation: str = "silu"

    @property
    def name(self) -> str:
        return f"norm_gated_matmul T{self.tokens} {self.channels} to {self.out} {self.activation}"


SHAPES = (
    Product(1, 4096, 512),
    Product(32, 4096, 512),
    Product(64, 1024, 2048),
    Product(5, 896, 4864),
    Product(17, 576, 1536, "gelu_tanh"),
)
REHEARSAL = (Product(3, 64, 96),)


def checks(implementation: str | None, rehearse: bool) -> list[Check]:
    """Every shape."""
    return [_check(product, implementation) for product in (REHEARSAL if rehearse else SHAPES)]


def _check(product: Product, implementation: str | None) -> Check:
    rng = np.random.default_rng([product.tokens, product.channels])
    dtype = jnp.dtype(jnp.bfloat16)
    x = (3 * rng.standard_normal((product.tokens, product.channels))).astype(dtype)
    scale = rng.uniform(0.5, 1.5, product.channels).astype(dtype)
    weights = (rng.standard_normal((2, product.out, product.channels)) * product.channels**-0.5).astype(dtype)

    def run(*operands: Any) -> jax.Array:
        return norm_gated_matmul(
            *operands, epsilon=EPSILON, activation=product.activation, implementation=implementation
        )

    def judge(result: Any) -> Ratios:
        pair = result.astype(np.float64), _expected(product, *(a.astype(np.float64) for a in (x, scale, weights)))
        # The normed channels, both products and the result are each rounded once; so is the gate in some versions.
        tolerance = 4 * UNIT_ROUNDOFF["bfloat16"]
        return {"out": relative_error(*pair) / tolerance, "worst row": worst_row_error(*pair) / (2 * tolerance)}

    return Check(product.name, "norm_gated_matmul", run, (x, scale, weights), judge)


def _expected(product: Product, x: np.ndarray, scale: np.ndarray, weights: np.ndarray) -> np.ndarray:
    normed = scale * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPSILON)
    gate, up = (normed @ part.T for part in weights)
    if product.activation == "silu":
        return gate / (1 + np.exp(-gate)) * up
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
