"""Norms and gates in the kernel of a quantised product: a layer on a GPU computes what it does without them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.sequence import SequenceDecoder
from jaxinfer.quant import gpu_matmul, matmul
from jaxinfer.quant.plan import QuantPlan, path_name
from pallas_kernels.quantized_matmul import quantized_matmul

CONFIG = ModelConfig(256, 64, 96, 1, 8, 2, max_position_embeddings=64)
IDS = np.array([[5, 9, 17, 33, 60, 2, 40, 11], [7, 7, 1, 200, 3, 90, 14, 15]])


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Products as a GPU takes them, the kernel interpreted; what is around each is listed."""
    seen: list[dict[str, Any]] = []

    def multiply(*args: Any, **options: Any) -> Any:
        seen.append(options)
        return quantized_matmul(*args, **options, implementation="triton-interpret")

    monkeypatch.setattr(gpu_matmul, "quantized_matmul", multiply)
    monkeypatch.setattr(gpu_matmul, "chosen_implementation", lambda *_, **__: "triton")
    monkeypatch.setattr(matmul, "_on_cpu", gpu_matmul.gpu_product)
    return seen


def logits_of(config: ModelConfig, params: Any) -> np.ndarray:
    return np.asarray(SequenceDecoder(config)(params, jnp.asarray(IDS)), np.float32)


def stored(plan: QuantPlan, params: Any) -> Any:
    def apply(path: Any, leaf: np.ndarray) -> Any:
        kept = plan.apply(path_name(path), leaf, "bfloat16")
        return jnp.asarray(kept, jnp.bfloat16) if isinstance(kept, np.ndarray) else jax.device_put(kept)

    return jax.tree_util.tree_map_with_path(apply, params)


@pytest.mark.parametrize("method", ["int8_w8a8", "int4"])
def test_a_model_computes_the_same(
    method: Any, on_gpu: list[dict[str, Any]], random_params: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = QuantPlan(method, 32 if method == "int4" else None)
    params = stored(plan, random_params(CONFIG, scale=0.08))
    with_kernels = logits_of(CONFIG, params)
    gates = [options for options in on_gpu if options["activation"] is not None]
    assert gates and all(options["norm"] is not None for options in gates)
    rounds = method == "int8_w8a8"
    assert {options["gives_maxima"] for options in gates} == {rounds}
    assert any(options["row_maxima"] is not None for options in on_gpu) == rounds
    normed = [options for options in on_gpu if options["norm"] is not None and options["activation"] is None]
    assert bool(normed) == rounds
    on_gpu.clear()
    # The same without anything around the products.
    monkeypatch.setattr(gpu_matmul, "chosen_implementation", lambda *_, **__: "xla")
    jax.clear_caches()
    plain = logits_of(CONFIG, params)
    assert on_gpu and all(options["norm"] is None and options["activation"] is None for options in on_gpu)
    spread = np.abs(plain - plain.mean()).max()
    assert np.abs(with_kernels - plain).mean() < 0.01 * spread
    np.testing.assert_allclose(with_kernels, plain, atol=0.05 * spread)


@pytest.mark.parametrize(
    ("changes", "norms", "gates"),
    [
        ({}, 1, 1),
        ({"qkv_bias": True}, 0, 1),
        ({"mlp_bias": True}, 1, 0),
        ({"norm_unit_offset": True}, 0, 0),
        ({"norm": "layer"}, 0, 0),
        ({"norm": "layer", "block": "parallel_shared_norm"}, 0, 0),
    ],
    ids=str,
)
def test_what_no_kernel_does_stays_outside(
    changes: dict[str, Any], norms: int, gates: int, on_gpu: list[dict[str, Any]], random_params: Callable[..., Any]
) -> None:
    """Biases come after products, and before gates; other norms than the plain one are not the kernel's."""
    config = replace(CONFIG, **changes)
    params = stored(QuantPlan("int8_w8a8"), random_params(config))
    jax.eval_shape(SequenceDecoder(config), params, IDS)
    assert sum(options["norm"] is not None and options["activation"] is None for options in on_gpu) == norms
    assert sum(options["activation"] is not None for options in on_gpu) == gates


def test_maxima_are_not_given_to_a_product_that_rounds_nothing(
    on_gpu: list[dict[str, Any]], random_params: Callable[..., Any]
) -> None:
    """Checkpoints may have W8A8 before the gate and W4A16 behind it."""
    floats = random_params(CONFIG)
    params = stored(QuantPlan("int8_w8a8"), floats)
    other = stored(QuantPlan("int4", 32), floats)
    params["layers_0"]["mlp"]["down"] = other["layers_0"]["mlp"]["down"]
    jax.eval_shape(SequenceDecoder(CONFIG), params, IDS)
    assert any(options["gives_maxima"] for options in on_gpu)
    assert all(options["row_maxima"] is None for options in on_gpu)
