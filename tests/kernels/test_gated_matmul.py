"""Norm, projections and gate against float64 loops; the kernel is interpreted."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_matmul import ACTIVATIONS, norm_gated_matmul
from pallas_kernels.gated_matmul.api import _self_check

EPSILON = 1e-5


def operands(tokens: int, channels: int, gates: int, dtype: Any, seed: int = 0) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    x = 3 * rng.standard_normal((tokens, channels))
    scale = rng.uniform(0.5, 2.0, channels)
    weights = rng.standard_normal((2, gates, channels)) / channels**0.5
    return tuple(jnp.asarray(array, dtype) for array in (x, scale, weights))


def in_float64(x: Any, scale: Any, weights: Any, activation: str) -> np.ndarray:
    x, scale, weights = (np.asarray(array).astype(np.float64) for array in (x, scale, weights))
    normed = scale * x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON)
    gate, up = normed @ weights[0].T, normed @ weights[1].T
    functions = {
        "silu": lambda g: g / (1 + np.exp(-g)),
        "gelu": np.vectorize(lambda g: g * 0.5 * (1 + math.erf(g / 2**0.5))),
        "gelu_tanh": lambda g: 0.5 * g * (1 + np.tanh((2 / np.pi) ** 0.5 * (g + 0.044715 * g**3))),
        "relu": lambda g: np.maximum(g, 0),
    }
    return functions[activation](gate) * up


def run(arrays: tuple[jax.Array, ...], activation: str, implementation: str) -> np.ndarray:
    options = {"epsilon": EPSILON, "activation": activation, "implementation": implementation}
    out = jax.jit(lambda *given: norm_gated_matmul(*given, **options))(*arrays)
    assert out.dtype == arrays[0].dtype
    return np.asarray(out).astype(np.float64)


@pytest.mark.parametrize("implementation", ["triton-interpret", "xla"])
@pytest.mark.parametrize(
    ("tokens", "channels", "gates", "activation"),
    [
        (1, 64, 32, "silu"),
        (5, 192, 96, "gelu_tanh"),
        (16, 128, 64, "silu"),
        (33, 128, 64, "relu"),
        (64, 256, 32, "silu"),
    ],
)
def test_equals_float64(tokens: int, channels: int, gates: int, activation: str, implementation: str) -> None:
    arrays = operands(tokens, channels, gates, jnp.bfloat16)
    expected = in_float64(*arrays, activation)
    out = run(arrays, activation, implementation)
    # A rounding of the normed row moves a product by about an ulp of its terms, of variance 1 together.
    np.testing.assert_allclose(out, expected, rtol=2**-6, atol=2**-6 * np.abs(expected).max())
    assert np.abs(out - expected).mean() < 2**-8 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_other_dtypes_run_in_xla(dtype: Any) -> None:
    arrays = operands(7, 48, 20, dtype)
    expected = in_float64(*arrays, "silu")
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(run(arrays, "silu", "xla"), expected, rtol=tolerance, atol=tolerance * expected.max())
    with pytest.raises(NotImplementedError, match="must be bfloat16; use 'xla'"):
        run(arrays, "silu", "triton-interpret")


def test_exact_gelu_runs_in_xla() -> None:
    arrays = operands(5, 64, 32, jnp.bfloat16)
    expected = in_float64(*arrays, "gelu")
    np.testing.assert_allclose(run(arrays, "gelu", "xla"), expected, rtol=2**-6, atol=2**-6 * np.abs(expected).max())
    with pytest.raises(NotImplementedError, match="has no error function; use 'xla' or 'gelu_tanh'"):
        run(arrays, "gelu", "triton-interpret")


def test_a_token_does_not_depend_on_the_others() -> None:
    x, scale, weights = operands(20, 128, 32, jnp.bfloat16)
    together = run((x, scale, weights), "silu", "triton-interpret")
    spoilt = run((x.at[3].set(jnp.nan), scale, weights), "silu", "triton-interpret")
    assert np.isnan(spoilt[3]).all()
    np.testing.assert_array_equal(np.delete(spoilt, 3, 0), np.delete(together, 3, 0))


@pytest.mark.parametrize("implementation", ["triton-interpret", "xla"])
def test_no_tokens_give_no_gates(implementation: str) -> None:
    assert run(operands(0, 64, 32, jnp.bfloat16), "silu", implementation).shape == (0, 32)


def test_derivatives_are_those_of_the_reference() -> None:
    arrays = operands(3, 64, 32, jnp.bfloat16)

    def loss(implementation: str, *given: jax.Array) -> jax.Array:
        out = norm_gated_matmul(*given, epsilon=EPSILON, activation="silu", implementation=implementation)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    got, want = (
        jax.jit(jax.grad(lambda *given, name=name: loss(name, *given), argnums=(0, 1, 2)))(*arrays)
        for name in ("triton-interpret", "reference")
    )
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(
            np.float32(one), np.float32(other), rtol=0.1, atol=0.05 * float(jnp.abs(other).max())
        )


def test_what_the_kernel_cannot_do_is_said() -> None:
    with pytest.raises(NotImplementedError, match="65 tokens: the kernel is for at most 64"):
        run(operands(65, 64, 32, jnp.bfloat16), "silu", "triton-interpret")
    with pytest.raises(NotImplementedError, match="F divisible by 32 and D by 64"):
        run(operands(2, 64, 33, jnp.bfloat16), "silu", "triton-interpret")


def test_mistakes_are_named() -> None:
    x, scale, weights = operands(2, 64, 32, jnp.bfloat16)
    with pytest.raises(ValueError, match=r"x\(2, 64\) must be \[T, D\].*weights\(32, 64\) \[2, F, D\]"):
        norm_gated_matmul(x, scale, weights[0], epsilon=EPSILON, activation="silu")
    with pytest.raises(ValueError, match=r"x \(bfloat16\), scale \(float32\) and weights \(bfloat16\) must have one"):
        norm_gated_matmul(x, jnp.float32(scale), weights, epsilon=EPSILON, activation="silu")
    with pytest.raises(ValueError, match="epsilon=0 of norm_gated_matmul must be above 0"):
        norm_gated_matmul(x, scale, weights, epsilon=0, activation="silu")
    with pytest.raises(ValueError, match=f"activation='swish' must be one of {', '.join(ACTIVATIONS)}"):
        norm_gated_matmul(x, scale, weights, epsilon=EPSILON, activation="swish")


def test_the_self_check_tells_wrong_numbers() -> None:
    got, want = (np.float32(_self_check(name, "bfloat16", "silu")) for name in ("triton-interpret", "reference"))
    assert np.abs(got - want).max() < 0.04 * np.abs(want).max()
    other = np.float32(_self_check("reference", "bfloat16", "relu"))
    assert np.abs(other - want).max() > 0.04 * np.abs(want).max()
