"""Layer by layer: what each layer is calibrated on, what comes out, and going on where an earlier run stopped."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.calibration.layer_result import CalibratedMethod, LayerResult
from jaxinfer.calibration.layerwise import quantise_layers
from jaxinfer.calibration.matrix import Matrix
from jaxinfer.calibration.statistics import layer_statistics
from jaxinfer.checkpoint.leaf_shapes import flat, nested
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.sequence import SequenceDecoder
from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.quantize import dequantized, quantize
from jaxinfer.quant.storage import Storage

SAMPLES = np.random.default_rng(5).integers(0, 64, (4, 24)).astype(np.int32)
AWQ = CalibratedMethod("awq", group=16)
GPTQ = CalibratedMethod("gptq", group=16, symmetric=True, act_order=True)


@pytest.fixture(scope="module")
def quantise(make_config: Any, make_params: Any) -> Callable[..., list[LayerResult]]:
    """`quantise("llama", method)`: the results of all layers."""

    def run(name: str, method: CalibratedMethod, **options: Any) -> list[LayerResult]:
        config, params = make_config(name), make_params(make_config(name))

        flattened = flat(params)
        return list(
            quantise_layers(config, params, lambda index: layer_of(flattened, index), method, SAMPLES, **options)
        )

    return run


@pytest.fixture(scope="module")
def gptq_results(quantise: Any) -> list[LayerResult]:
    results: list[LayerResult] = quantise("llama", GPTQ)
    return results


@pytest.fixture(scope="module")
def awq_results(quantise: Any) -> list[LayerResult]:
    results: list[LayerResult] = quantise("llama", AWQ)
    return results


def layer_of(params: dict[str, Any], index: int) -> dict[str, Any]:
    return {path: value for path, value in params.items() if path.startswith(f"layers_{index}/")}


def in_floats(value: Any) -> np.ndarray:
    return dequantized(value) if isinstance(value, QuantArray) else np.asarray(value)


def quantised_layer(result: LayerResult) -> Any:
    floats = {path: jnp.asarray(in_floats(value)) for path, value in result.params.items()}
    return nested(floats)[f"layers_{result.index}"]


def test_errors_are_less_than_of_rounding(gptq_results: list[LayerResult], awq_results: list[LayerResult]) -> None:
    for result in (*gptq_results, *awq_results):
        quantised = {path for path, value in result.params.items() if isinstance(value, QuantArray)}
        assert {f"layers_{result.index}/{report.path}" for report in result.reports} == quantised
    gptq, awq = ([r for result in each for r in result.reports] for each in (gptq_results, awq_results))
    assert np.mean([report.error / report.rounded for report in gptq]) < 0.7
    assert all(report.error <= report.scaled <= report.rounded for report in awq if report.scaled is not None)
    foldable = [report for report in awq if report.foldable]
    assert {report.path for report in awq} == {report.path for report in foldable}
    assert np.mean([report.scaled < report.rounded for report in foldable]) > 0.9


def test_gptq_sees_what_the_quantised_layers_before_give(
    gptq_results: list[LayerResult], make_config: Any, make_params: Any
) -> None:
    config, params = make_config("llama"), jax.tree.map(jnp.asarray, make_params(make_config("llama")))
    decoder = SequenceDecoder(config)
    x = decoder.layer(0, quantised_layer(gptq_results[0]), decoder.embed(params, SAMPLES))
    layer = params["layers_1"]
    after = layer | {"attn": layer["attn"] | {"qkv": quantised_layer(gptq_results[1])["attn"]["qkv"]}}
    for module, given in (("attn/qkv", layer), ("attn/out", after)):
        kernel = layer["attn"][module.split("/")[1]]["kernel"]
        gram = np.asarray(
            layer_statistics(config, config.layer_kind(1), (module,), given, x)[module].gram[0], np.float64
        )
        stored = gptq_results[1].params[f"layers_1/{module}/kernel"]
        assert isinstance(stored, QuantArray) and stored.order is not None
        weights = np.asarray(kernel, np.float64).reshape(-1, len(gram))
        change = dequantized(stored).reshape(weights.shape) - weights
        error = np.einsum("ni,ij,nj->", change, gram, change) / np.einsum("ni,ij,nj->", weights, gram, weights)
        (report,) = [one for one in gptq_results[1].reports if one.path == f"{module}/kernel"]
        assert report.error == pytest.approx(error, rel=1e-3)


def output_errors(config: ModelConfig, original: dict[str, Any], result: LayerResult) -> tuple[float, float]:
    """How far the quantised layer's outputs are from the original's; how far those of one that is rounded are."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((4, 24, 32)), jnp.float32)

    def output(params: dict[str, Any]) -> np.ndarray:
        floats = {path: jnp.asarray(in_floats(value)) for path, value in params.items()}
        return np.asarray(SequenceDecoder(config).layer(result.index, nested(floats)[f"layers_{result.index}"], x))

    simple = dict(original)
    for path, stored in result.params.items():
        if isinstance(stored, QuantArray):
            simple[path] = quantize(original[path], stored.axis, Storage("int4", stored.group, symmetric=False))
    expected = output(original)
    quantised, rounded = (np.abs(output(params) - expected).mean() for params in (dict(result.params), simple))
    return float(quantised), float(rounded)


def test_awq_folds_its_scales(awq_results: list[LayerResult], make_config: Any, make_params: Any) -> None:
    """The layer is near the original one only if all that a scale goes into was changed with it."""
    config = make_config("llama")
    original = layer_of(flat(make_params(config)), 0)
    norm = "layers_0/mlp_norm/scale"
    assert not np.allclose(np.asarray(awq_results[0].params[norm]), original[norm])
    quantised, rounded = output_errors(config, original, awq_results[0])
    assert quantised < 0.9 * rounded


@pytest.mark.parametrize("method", [AWQ, GPTQ])
def test_goes_on_behind_finished_layers(method: CalibratedMethod, request: Any, quantise: Any) -> None:
    first, second = request.getfixturevalue(f"{method.name}_results")
    (again,) = quantise("llama", method, finished=lambda index: first.params if index == 0 else None)
    assert again.index == 1 and again.reports == second.reports
    jax.tree.map(np.testing.assert_array_equal, dict(again.params), dict(second.params))


@pytest.mark.parametrize("method", [AWQ, pytest.param(GPTQ, marks=pytest.mark.slow)])
def test_experts_that_nobody_goes_to(method: CalibratedMethod, make_config: Any, make_params: Any) -> None:
    """Nothing is known of the last one; its matrices are rounded all the same."""
    config = replace(make_config("moe"), num_hidden_layers=1)
    params = {"embed": make_params(config)["embed"]}
    layer = {path: value for path, value in flat(make_params(config)).items() if path.startswith("layers_0")}
    router = layer["layers_0/mlp/router/kernel"]
    router[1], router[2:] = -router[0], 0  # every token goes to one of the first two and, of those alike, to the first
    (result,) = quantise_layers(config, params, lambda index: layer, method, SAMPLES)
    reports = {report.path: report for report in result.reports}
    assert reports["mlp/down/kernel"].uncalibrated == reports["mlp/gate_up/kernel"].uncalibrated
    assert 3 in reports["mlp/down/kernel"].uncalibrated and 2 not in reports["mlp/down/kernel"].uncalibrated
    assert reports["mlp/shared/down/kernel"].uncalibrated == ()
    assert all(report.error <= report.rounded for report in result.reports)
    if method == AWQ:  # scales go into the router and both experts' matrices, too
        quantised, rounded = output_errors(config, layer, result)
        assert quantised < rounded


def test_formats_of_odd_matrices(make_config: Any) -> None:
    kind = make_config("llama").layer_kind(0)
    by_row = {}
    for row in (64, 48, 24):
        matrix = Matrix.of("mlp/down", (32, row), kind, replace(AWQ, group=64))
        by_row[row] = matrix.bits, matrix.group, matrix.symmetric
    assert by_row == {64: (4, 64, False), 48: (4, 16, False), 24: (8, 24, True)}
    assert Matrix.of("mlp/down", (32, 48), kind, replace(AWQ, group=0)).group == 48


def test_floats_get_the_dtype_that_is_asked_for(quantise: Any) -> None:
    first, _ = quantise("llama", replace(AWQ, dtype="bfloat16"))
    assert first.params["layers_0/attn_norm/scale"].dtype == jnp.bfloat16
    down = first.params["layers_0/mlp/down/kernel"]
    assert isinstance(down, QuantArray) and down.dtype == "bfloat16"


def test_damaged_weights_are_refused_by_name(make_config: Any, make_params: Any) -> None:
    params = flat(make_params(make_config("llama")))
    params["layers_0/mlp/down/kernel"][0, 0] = np.nan
    run = quantise_layers(make_config("llama"), nested(params), lambda index: layer_of(params, index), AWQ, SAMPLES)
    with pytest.raises(ValueError, match="parameter 'layers_0/mlp/down/kernel' holds NaN"):
        next(run)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "squeeze"}, "name='squeeze'"),
        ({"bits": 3}, "bits=3"),
        ({"name": "awq", "bits": 8}, "bits=8"),
        ({"group": 8}, "group=8"),
        ({"name": "awq", "symmetric": True}, "settings of 'gptq'"),
        ({"static_groups": True}, "needs act_order=True"),
        ({"damping": 0}, "damping=0"),
        ({"dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CalibratedMethod(**{"name": "gptq", **fields})
