"""Inputs that are rotated before they are rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import hadamard as scipy_hadamard

from jaxinfer.quant.array import dequantize, take_rows
from jaxinfer.quant.matmul import project
from jaxinfer.quant.plan import QuantPlan
from jaxinfer.quant.quantize import dequantized, quantize
from jaxinfer.quant.rotation import hadamard, rotate, rotated
from jaxinfer.quant.storage import ROTATION, Storage

PLAIN, ROTATED = Storage("int8", act_bits=8), Storage("int8", act_bits=8, rotated=True)


def weights(channels: int = 24, row: int = 2 * ROTATION) -> np.ndarray:
    return np.random.default_rng(channels).standard_normal((channels, row)).astype(np.float32)


def test_the_matrix_is_hadamards() -> None:
    np.testing.assert_allclose(hadamard(64), scipy_hadamard(64) / 8, rtol=0)


def test_rows_on_host_and_device() -> None:
    rows = weights()
    expected = np.concatenate([rows[:, :64] @ (scipy_hadamard(64) / 8), rows[:, 64:] @ (scipy_hadamard(64) / 8)], 1)
    np.testing.assert_allclose(rotated(rows, 64), expected, atol=1e-5)
    np.testing.assert_allclose(rotate(jnp.asarray(rows), 64), expected, atol=1e-5)


def test_values_are_those_that_were_given() -> None:
    values = weights()
    array = quantize(values, 1, ROTATED)
    # Half a step of each of a block's codes, all of the same sign at worst.
    bound = np.sqrt(ROTATION) * array.scale / 2 * 1.001
    assert (np.abs(dequantized(array) - values) <= bound).all()
    np.testing.assert_allclose(dequantize(jax.device_put(array)), dequantized(array), atol=1e-5)
    np.testing.assert_allclose(
        take_rows(jax.device_put(array), jnp.array([3, 1])), dequantized(array)[[3, 1]], atol=1e-5
    )


@pytest.mark.parametrize("tokens", [1, 7])
def test_products_with_outliers(tokens: int) -> None:
    """One input a thousand times the others takes all codes of its row, unless it is spread."""
    values = weights()
    x = np.random.default_rng(tokens).standard_normal((tokens, values.shape[1])).astype(np.float32)
    x[:, 5] = 300
    expected = x.astype(np.float64) @ values.T.astype(np.float64)
    errors = {}
    for storage in (PLAIN, ROTATED):
        array = jax.device_put(quantize(values, 1, storage))
        errors[storage] = np.abs(np.asarray(jax.jit(project)(jnp.asarray(x), array)) - expected).mean()
    assert errors[ROTATED] < errors[PLAIN] / 2


def test_degenerate_rows() -> None:
    values = weights()
    values[0], values[1], values[2] = 0, values[1] * 1e-38, values[2] * 1e30
    array = quantize(values, 1, ROTATED)
    assert np.isfinite(dequantized(array)).all() and not dequantized(array)[0].any()
    assert np.abs(dequantized(array)[2] / 1e30 - values[2] / 1e30).max() < 0.1
    out = project(jnp.zeros((2, values.shape[1])), jax.device_put(array))
    assert not np.asarray(out).any()


def test_rows_that_blocks_do_not_divide() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        quantize(weights(row=96), 1, ROTATED)
    plan = QuantPlan("int8_w8a8", head=True, fast_form=True)
    assert plan.stored("layers_0/mlp/down/kernel", (64, 96)) == PLAIN
    assert plan.stored("layers_0/mlp/down/kernel", (64, 128)) == ROTATED
    assert plan.stored("lm_head/kernel", (100, 64)) == ROTATED
    assert QuantPlan("int8_w8a8").stored("layers_0/mlp/down/kernel", (64, 128)) == PLAIN
