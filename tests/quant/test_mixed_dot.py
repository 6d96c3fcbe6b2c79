"""uint8 by int8 on the CPU, against NumPy's integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.quant import cpu_matmul, mixed_dot
from jaxinfer.quant.cpu_matmul import cpu_product
from jaxinfer.quant.quantize import dequantized, quantize
from jaxinfer.quant.storage import Storage


@pytest.mark.parametrize(("rows", "row", "channels"), [(1, 7, 3), (2, 64, 16), (9, 100, 40), (33, 129, 17)])
def test_sums_are_exact(rows: int, row: int, channels: int) -> None:
    rng = np.random.default_rng(rows)
    x = rng.integers(0, 256, (rows, row), dtype=np.uint8)
    matrix = rng.integers(-128, 128, (channels, row), dtype=np.int8)
    x[0], matrix[0] = 255, -128
    out = jax.jit(mixed_dot.mixed_dot)(x, matrix)
    assert out.dtype == jnp.int32
    np.testing.assert_array_equal(out, x.astype(np.int64) @ matrix.astype(np.int64).T)
    np.testing.assert_array_equal(mixed_dot.mixed_dot(jnp.asarray(x), jnp.asarray(matrix)), out)


def test_xla_is_given_the_two_types() -> None:
    """Not int32: that product is twenty times as slow."""
    x, matrix = jax.ShapeDtypeStruct((9, 64), jnp.uint8), jax.ShapeDtypeStruct((40, 64), jnp.int8)
    text = jax.jit(mixed_dot.mixed_dot).lower(x, matrix).as_text()
    assert "(tensor<9x64xui8>, tensor<40x64xi8>) -> tensor<9x40xi32>" in text


@pytest.mark.parametrize("act_bits", [8, 16])
@pytest.mark.parametrize("tokens", [1, 5, 12])
def test_processors_agree(tokens: int, act_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the instruction for these types or without, a product is the same."""
    rng = np.random.default_rng(tokens)
    weight = quantize(rng.standard_normal((24, 96)).astype(np.float32), 1, Storage("int8", act_bits=act_bits))
    x = rng.standard_normal((tokens, 96)).astype(np.float32)
    x[0, 3] = 1000
    results = []
    for fast in (True, False):
        monkeypatch.setattr(mixed_dot, "is_fast", lambda fast=fast: fast)
        results.append(np.asarray(jax.jit(lambda x, weight: cpu_product(x, weight))(x, weight)))
    if act_bits == 8 or tokens <= cpu_matmul.FEW_ROWS:
        np.testing.assert_array_equal(results[0], results[1])
    else:
        bound = np.abs(x).max(1, keepdims=True) * np.abs(dequantized(weight)).sum(1)
        assert (np.abs(results[0] - results[1]) <= 1.6e-5 * bound).all()
