"""How far a result may be from float64, from the arithmetic that made it."""

from __future__ import annotations

import numpy as np

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Of round to nearest, half of the distance to the next number."""

TF32_ROUNDOFF = 2.0**-11
"""float32 operands of a tensor core keep 10 bits of their fraction."""


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """``|actual - expected| / |expected|`` of the whole arrays; infinite where NaN or infinity is wrong or new."""
    if not np.array_equal(np.isfinite(actual), np.isfinite(expected)):
        return float("inf")
    finite = np.isfinite(expected)
    norm = float(np.linalg.norm(expected[finite]))
    return float(np.linalg.norm(actual[finite] - expected[finite])) / max(norm, 1e-30)


def worst_row_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest error of a row along the last axis, over the row's norm or over the typical row's if that is more.

    One wrong row among hundreds is lost in the norm of all.
    """
    if not np.array_equal(np.isfinite(actual), np.isfinite(expected)):
        return float("inf")
    norms = np.linalg.norm(expected, axis=-1)
    typical = np.sqrt(np.mean(norms**2))
    errors = np.linalg.norm(actual - expected, axis=-1) / np.maximum(np.maximum(norms, typical), 1e-30)
    return float(np.max(errors, initial=0.0))


def attention_tolerance(dtype: str) -> float:
    """Of `relative_error` for an attention whose inputs were exact in `dtype`, or codes with float32 scales.

    Logits and sums are float32; the softmax's weights are rounded to `dtype` before they meet the values, and so is the
    result. Each is an error of at most a unit roundoff of what it rounds. Where the values cancel, as random ones do in
    a long mean, the norm of the result shrinks by the same root as the weights' errors, which are independent.
    Float32 operands may pass the tensor cores as tf32, and then keys, queries, weights and values are rounded too.
    """
    if dtype == "float32":
        return 4 * TF32_ROUNDOFF
    return 2 * UNIT_ROUNDOFF[dtype]


def gradient_tolerance(dtype: str) -> float:
    """Likewise for gradients, where the logits' gradients are rounded to `dtype` too, and the output that was saved."""
    return 2 * attention_tolerance(dtype)
