"""`project`: the same product in either orientation, and the orientation the CPU wants."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.linear import FEW_TOKENS, project


def operands(num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(num_tokens)
    return rng.standard_normal((num_tokens, 7)), rng.standard_normal((11, 7))


@pytest.mark.parametrize("num_tokens", [1, 5, FEW_TOKENS, FEW_TOKENS + 1])
def test_product_and_gradients_equal_numpy(num_tokens: int) -> None:
    x, weight = operands(num_tokens)
    got, pull_back = jax.vjp(jax.jit(project), jnp.float32(x), jnp.float32(weight))
    np.testing.assert_allclose(got, x @ weight.T, rtol=1e-5, atol=1e-5)
    seed = np.random.default_rng(1).standard_normal(got.shape)
    to_x, to_weight = pull_back(jnp.float32(seed))
    np.testing.assert_allclose(to_x, seed @ weight, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(to_weight, seed.T @ x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("num_tokens", "weights_left"), [(5, True), (FEW_TOKENS + 1, False)])
def test_few_tokens_have_the_weights_on_the_left_on_the_cpu(num_tokens: int, weights_left: bool) -> None:
    """What XLA makes of it: its simplifier turns such products around unless it is kept from that."""
    x, weight = (jnp.float32(operand) for operand in operands(num_tokens))
    program = jax.jit(project).lower(x, weight).compile().as_text()
    (product,) = re.findall(r"f32\[(\d+),(\d+)\]\S* dot\(", program)
    assert product == (("11", str(num_tokens)) if weights_left else (str(num_tokens), "11"))


def test_a_gpu_gets_the_plain_product() -> None:
    x, weight = (jnp.float32(operand) for operand in operands(5))
    text = jax.jit(project).trace(x, weight).lower(lowering_platforms=("cuda",)).as_text()
    assert "optimization_barrier" not in text
    assert "tensor<5x7xf32>, tensor<11x7xf32>" in text
