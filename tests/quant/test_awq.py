"""AWQ's searches against plain loops over their definition."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.quant.awq import clipped, scaled_error, search_scales
from jaxinfer.quant.grid import restored, rounded

GROUP = 16


def stored(weights: np.ndarray) -> np.ndarray:
    """Asymmetric int4 by the definition, group by group."""
    out = np.zeros(weights.shape)
    for index in np.ndindex(*weights.shape[:-1], weights.shape[-1] // GROUP):
        *row, group = index
        part = (*row, slice(group * GROUP, (group + 1) * GROUP))
        low, high = min(weights[part].min(), 0), max(weights[part].max(), 0)
        scale = float(np.float16(max((high - low) / 15, 2.0**-14)))
        zero = np.clip(np.rint(-low / scale), 0, 15)
        out[part] = (np.clip(np.rint(weights[part] / scale) + zero, 0, 15) - zero) * scale
    return out


def error(weights: np.ndarray, changed: np.ndarray, x: np.ndarray) -> float:
    return float(((x @ (changed - weights).T) ** 2).sum())


@pytest.fixture
def inputs() -> np.ndarray:
    """Some much louder than others, one silent."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 48)) * rng.lognormal(0, 1.5, 48)
    x[:, 7] = 0
    return x


def test_rounding_is_that_of_the_definition() -> None:
    weights = np.random.default_rng(1).standard_normal((5, 48)).astype(np.float32)
    weights[0, :16] = 0
    weights[1, :16] = 3
    found = restored(*rounded(jnp.asarray(weights), bits=4, group=GROUP, symmetric=False))
    np.testing.assert_allclose(found, stored(weights), rtol=0, atol=1e-5)


def test_the_scale_is_the_best_of_those_that_make_no_matrix_worse(inputs: np.ndarray) -> None:
    rng = np.random.default_rng(2)
    matrices = [rng.standard_normal((rows, 48)).astype(np.float32) for rows in (12, 6)]
    gram, magnitude = (inputs.T @ inputs).astype(np.float32), np.abs(inputs).mean(0)
    errors = []
    for ratio in np.arange(20) / 20:
        scale = np.where(magnitude > 0, np.maximum(magnitude, 1e-4 * magnitude.max()) ** ratio, 1)
        scale /= np.sqrt(scale[magnitude > 0].max() * scale[magnitude > 0].min())
        scale[magnitude == 0] = 1
        errors.append([error(w, stored(w * scale) / scale, inputs) for w in matrices])
    table = np.array(errors)
    sums = np.where((table <= table[0]).all(1), (table / table[0]).sum(1), np.inf)
    assert sums.min() < 1.4  # of two matrices
    found = search_scales(
        tuple(jnp.asarray(w)[None] for w in matrices),
        (jnp.asarray(gram)[None],) * 2,
        magnitude[None],
        group=(GROUP,) * 2,
    )
    assert float(found.ratio) == pytest.approx(sums.argmin() / 20)
    for w, expected in zip(matrices, table[sums.argmin()], strict=True):
        after = scaled_error(jnp.asarray(w)[None], jnp.asarray(gram)[None], found.scale, group=GROUP)
        assert float(after) == pytest.approx(expected, rel=1e-2)


def test_no_scale_where_all_inputs_are_silent() -> None:
    weights = jnp.ones((1, 4, 16))
    found = search_scales((weights,), (jnp.zeros((1, 16, 16)),), jnp.zeros((1, 16)), group=(16,))
    assert (found.scale == 1).all() and float(found.ratio) == 0


def test_limits_are_the_best_of_each_group_and_no_channel_is_worse(inputs: np.ndarray) -> None:
    weights = np.random.default_rng(3).standard_t(3, (10, 48)).astype(np.float32)
    gram = (inputs.T @ inputs).astype(np.float32)
    cut = weights.copy()
    for n, group in np.ndindex(10, 3):
        part = slice(group * GROUP, (group + 1) * GROUP)
        row, x = weights[n : n + 1, part], inputs[:, part]
        tried = [np.clip(row, -limit, limit) for limit in (1 - np.arange(10) / 20) * np.abs(row).max()]
        cut[n, part] = min(tried, key=lambda one: error(row, stored(one), x))
    kept = [
        error(w[None], stored(c[None]), inputs) < error(w[None], stored(w[None]), inputs)
        for w, c in zip(weights, cut, strict=True)
    ]
    expected = np.where(np.array(kept)[:, None], cut, weights)
    found: Any = clipped(jnp.asarray(weights)[None], jnp.asarray(gram)[None], group=GROUP)[0]
    assert sum(kept) > 0 and (expected != weights).any()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
