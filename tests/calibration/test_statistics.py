"""Sums over what goes into a layer's matrices, against the layer written out in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.calibration.statistics import added, layer_statistics


def normed(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def test_of_experts_are_of_the_tokens_that_go_to_them(make_config: Any, make_params: Any) -> None:
    """Attention gives nothing here, so that the layer's input is what the experts' norm sees."""
    config = make_config("moe")
    layer = make_params(config)["layers_0"]
    layer["attn"]["out"]["kernel"][:] = 0
    x = np.random.default_rng(2).standard_normal((2, 5, 32)).astype(np.float32)
    modules = ("attn/qkv", "mlp/gate_up", "mlp/down", "mlp/shared/down")
    params = jax.tree.map(jnp.asarray, layer)
    once = layer_statistics(config, config.layer_kind(0), modules, params, jnp.asarray(x))
    found = added(once, layer_statistics(config, config.layer_kind(0), modules, params, jnp.asarray(x)))

    rows = x.reshape(10, 32).astype(np.float64)
    into_attention = normed(rows, layer["attn_norm"]["scale"])
    np.testing.assert_allclose(found["attn/qkv"].gram[0], 2 * into_attention.T @ into_attention, rtol=1e-4, atol=1e-3)
    assert found["attn/qkv"].tokens.tolist() == [20]

    n = normed(rows, layer["mlp_norm"]["scale"])
    scores = n @ layer["mlp"]["router"]["kernel"].T
    probs = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    chosen = probs >= np.sort(probs, axis=1)[:, -2:-1]
    weights = np.where(chosen, probs, 0) / np.where(chosen, probs, 0).sum(1, keepdims=True)
    assert found["mlp/gate_up"].tokens.tolist() == (2 * chosen.sum(0)).tolist()
    for expert in range(4):
        mine = n[chosen[:, expert]]
        gate, up = (mine @ layer["mlp"]["gate_up"]["kernel"][part, expert].T for part in (0, 1))
        hidden = gate / (1 + np.exp(-gate)) * up * weights[chosen[:, expert], expert][:, None]
        for module, inputs in (("mlp/gate_up", mine), ("mlp/down", hidden)):
            sums = found[module]
            np.testing.assert_allclose(sums.gram[expert], 2 * inputs.T @ inputs, rtol=1e-3, atol=1e-2)
            np.testing.assert_allclose(sums.magnitude[expert], 2 * np.abs(inputs).sum(0), rtol=1e-3, atol=1e-3)
    gate, up = (n @ layer["mlp"]["shared"]["gate_up"]["kernel"][part].T for part in (0, 1))
    hidden = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(found["mlp/shared/down"].gram[0], 2 * hidden.T @ hidden, rtol=1e-3, atol=1e-2)
