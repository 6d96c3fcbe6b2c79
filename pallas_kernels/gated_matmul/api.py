"""The public operation: documentation, checks, choice of implementation."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import choose
from pallas_kernels.gated_matmul.reference import ACTIVATIONS, norm_gated_matmul_reference
from pallas_kernels.gated_matmul.triton import check_triton, norm_gated_matmul_triton
from pallas_kernels.kv_format import FLOAT_DTYPES

OP = "norm_gated_matmul"


def norm_gated_matmul(
    x: jax.Array,
    scale: jax.Array,
    weights: jax.Array,
    *,
    epsilon: float,
    activation: str,
    implementation: str | None = None,
) -> jax.Array:
    """RMSNorm (arXiv:1910.07467), two projections, and the gate of a GLU (arXiv:2002.05202): on a GPU one launch.

    ``activation(n . gate^T) * (n . up^T)`` with ``n = scale * x / sqrt(mean(x^2) + epsilon)``. The kernel is for the
    few tokens of a decode step in bfloat16; other cases run in plain XLA.

    Args:
        x: [T, D], float32, bfloat16 or float16.
        scale: [D], of the norm, in x's dtype.
        weights: [2, F, D], gate and up, in x's dtype.
        epsilon: of the norm, above 0.
        activation: one of `ACTIVATIONS`.
        implementation: one of `pallas_kernels.dispatch.IMPLEMENTATIONS`; None chooses for the current device.

    Returns:
        [T, F] in x's dtype. It can be differentiated; the derivatives are plain XLA.

    Raises:
        ValueError: shapes or dtypes that do not fit together, an epsilon that is not above 0, or an unknown activation
            or implementation.
    """
    if x.ndim != 2 or scale.shape != x.shape[1:] or weights.ndim != 3 or weights.shape[::2] != (2, x.shape[1]):
        raise ValueError(f"x{x.shape} must be [T, D], scale{scale.shape} [D] and weights{weights.shape} [2, F, D]")
    if x.dtype not in FLOAT_DTYPES or scale.dtype != x.dtype or weights.dtype != x.dtype:
        raise ValueError(
            f"x ({x.dtype}), scale ({scale.dtype}) and weights ({weights.dtype}) must have one dtype of "
            f"{', '.join(map(str, FLOAT_DTYPES))}: cast them"
        )
    if not epsilon > 0:
        raise ValueError(f"epsilon={epsilon} of norm_gated_matmul must be above 0")
    name = chosen_implementation(x, weights, activation, implementation)
    if x.size and name.startswith("triton"):
        return norm_gated_matmul_triton(x, scale, weights, epsilon, activation, name == "triton-interpret")
    return norm_gated_matmul_reference(x, scale, weights, epsilon=epsilon, activation=activation)


def chosen_implementation(x: Any, weights: Any, activation: str, implementation: str | None = None) -> str:
    """What `norm_gated_matmul` would run for operands of these shapes and dtypes.

    Raises:
        ValueError: an unknown activation or implementation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} must be one of {', '.join(ACTIVATIONS)}")
    name = choose(
        OP,
        implementation,
        check=partial(check_triton, x, weights, activation),
        self_check=_self_check,
        case=(str(x.dtype), activation),
    )
    if implementation is not None and name.startswith("triton"):
        check_triton(x, weights, activation, None)
    return name


def _self_check(implementation: str, dtype: str, activation: str) -> jax.Array:
    rng = np.random.default_rng(0)
    x, weights = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((5, 128), (2, 64, 128)))
    scale = jnp.asarray(rng.uniform(0.5, 2.0, 128), dtype)
    return norm_gated_matmul(x, scale, weights / 8, epsilon=1e-5, activation=activation, implementation=implementation)
