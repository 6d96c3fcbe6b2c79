"""Scales go into what makes a matrix's inputs, exactly: the layer computes what it did."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.calibration.fold import divide, foldable_scale, folds, output_scale, shared_magnitude
from jaxinfer.calibration.layer_result import CalibratedMethod
from jaxinfer.calibration.matrix import Matrix
from jaxinfer.checkpoint.leaf_shapes import flat, nested
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.sequence import run_layer

SOURCES = {
    "llama": ["attn_norm", "mlp_norm", "attn/qkv", "mlp/gate_up"],
    "gemma": ["attn_norm", "mlp_norm", "attn/qkv", "mlp/gate_up"],
    "cohere": ["attn_norm", "attn/qkv", "mlp/gate_up"],
    "biased": ["attn_norm", "mlp_norm", "attn/qkv", "mlp/gate_up"],
    "stablelm": ["attn_norm", "mlp_norm", "attn/qkv", "mlp/gate_up"],
    "relu": ["attn_norm", "mlp_norm", "attn/qkv", "mlp/up"],
    "gelu": ["attn_norm", "mlp_norm", "attn/qkv"],
    "olmo2": ["attn/qkv", "mlp/gate_up"],
    "moe": ["attn_norm", "mlp_norm", "attn/qkv", "mlp/gate_up", "mlp/shared/gate_up"],
}


@pytest.mark.parametrize("name", SOURCES)
def test_where_scales_can_go(name: str, make_config: Any, make_params: Callable[..., Any]) -> None:
    config: ModelConfig = make_config(name)
    found = folds(config, config.layer_kind(1), flat(make_params(config)["layers_1"]))
    assert [fold.source for fold in found] == SOURCES[name]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gemma", "bfloat16"), *((name, "float32") for name in ("cohere", "biased", "relu", "moe"))],
)
def test_the_layer_stays_what_it_is(name: str, dtype: str, make_config: Any, make_params: Callable[..., Any]) -> None:
    config: ModelConfig = make_config(name)
    params = flat(make_params(config)["layers_1"])
    rng = np.random.default_rng(3)
    run = partial(run_layer, config, config.layer_kind(1), None, segments=None)
    run = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})  # a small layer, twice
    x = jnp.asarray(rng.standard_normal((2, 6, 32)), jnp.float32)
    expected = run(nested(params), x)
    for fold in folds(config, config.layer_kind(1), params):
        fold_scale(config, fold, params, dtype, rng)
    np.testing.assert_allclose(run(nested(params), x), expected, rtol=2e-4, atol=2e-4)


def fold_scale(config: ModelConfig, fold: Any, params: dict[str, Any], dtype: str, rng: Any) -> None:
    """Any scale will do."""
    matrices = [matrix_of(config, module, params) for module in fold.consumers]
    experts, _, inputs = matrices[0].parts(params[f"{fold.consumers[0]}/kernel"]).shape
    shape = (1 if fold.source.endswith("norm") else experts, inputs)
    scale = shared_magnitude(config, fold.source, rng.lognormal(0, 1, shape).astype(np.float32))
    scale = foldable_scale(config, fold.source, params, scale, dtype)
    divide(config, fold.source, params, scale, dtype)
    for matrix in matrices:
        path = f"{matrix.module}/kernel"
        params[path] = matrix.whole(matrix.parts(params[path]) * scale[:, None]).reshape(matrix.shape)
    for module in fold.unquantised:
        params[f"{module}/kernel"] = params[f"{module}/kernel"] * scale[0]
    path = f"{fold.source}/kernel"
    if path in params:
        outputs = matrix_of(config, fold.source, params)
        divisor = output_scale(fold.source, outputs.shape[: outputs.axis], scale)
        params[path] = params[path] / divisor[(..., *[None] * (len(outputs.shape) - outputs.axis))]


def matrix_of(config: ModelConfig, module: str, params: dict[str, Any]) -> Any:
    return Matrix.of(module, params[f"{module}/kernel"].shape, config.layer_kind(1), CalibratedMethod("awq", group=16))
