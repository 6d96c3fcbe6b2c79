"""A model quantised layer by layer, with one layer's parameters on the device at a time."""

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.calibration.awq_layer import awq_layer
from jaxinfer.calibration.gptq_layer import gptq_layer
from jaxinfer.calibration.layer_result import CalibratedMethod, LayerParams, LayerResult, MatrixReport
from jaxinfer.calibration.matrix import check_kernel, kernels
from jaxinfer.calibration.statistics import Statistics, added, layer_statistics
from jaxinfer.models.config import LayerKind, ModelConfig
from jaxinfer.models.sequence import SequenceDecoder
from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.quantize import dequantized
from jaxinfer.typing import Params

BATCH_TOKENS = 4096
"""Tokens that go through a layer at a time."""

Finished = Mapping[str, np.ndarray | QuantArray]


def quantise_layers(
    config: ModelConfig,
    embedding: Params,
    read_layer: Callable[[int], LayerParams],
    method: CalibratedMethod,
    samples: np.ndarray,
    *,
    finished: Callable[[int], Finished | None] = lambda index: None,
) -> Iterator[LayerResult]:
    """Quantises the layers in turn.

    GPTQ calibrates a layer on what the quantised layers before it give, AWQ on what the original ones give, as their
    papers do. All is computed in float32. What the samples have become lies in host memory, 4 bytes a channel and
    token; one layer's parameters and its statistics are on the device.

    Args:
        config: the architecture.
        embedding: the tree with "embed", and "embed_positions" where positions are learned.
        read_layer: gives a layer's parameters in floats, by paths like "layers_3/mlp/down/kernel".
        method: what to do.
        samples: int32[samples, seq_len] of `calibration_samples`.
        finished: gives the parameters of a layer that has been quantised before, as `LayerResult.params` has them, or
            None. The text runs through such a layer, and it is left out.

    Yields:
        Each layer as soon as it is done.

    Raises:
        ValueError: samples are longer than learned positions reach, or a weight or an activation is not finite, or too
            large; names the parameter or the layer.
    """
    if config.learned_positions and samples.shape[1] > config.max_position_embeddings:
        raise ValueError(
            f"seq_len={samples.shape[1]} is longer than the model's {config.max_position_embeddings} positions"
        )
    decoder = SequenceDecoder(config)
    batches = [np.asarray(decoder.embed(embedding, jnp.asarray(ids)), np.float32) for ids in _batches(samples)]
    for index in range(config.num_hidden_layers):
        quantised = finished(index)
        original = _in_layer(read_layer(index)) if quantised is None or method.name == "awq" else {}
        if quantised is None:
            result = _quantised(config, index, dict(original), method, batches)  # which changes what it is given
            yield result
            quantised = result.params
        if index + 1 < config.num_hidden_layers:
            params = original if method.name == "awq" else _in_layer(quantised)
            on_device = jax.tree.map(jnp.asarray, _nested(params))
            batches = [np.asarray(decoder.layer(index, on_device, jnp.asarray(x))) for x in batches]


def _quantised(
    config: ModelConfig, index: int, params: dict[str, np.ndarray], method: CalibratedMethod, batches: list[np.ndarray]
) -> LayerResult:
    kind = config.layer_kind(index)
    params = dict(params)  # what follows changes it; the next layer may be calibrated on what this one was
    for module in kernels(params):
        check_kernel(f"layers_{index}/{module}/kernel", params[f"{module}/kernel"])

    def observe(params: Mapping[str, Any], modules: tuple[str, ...]) -> Statistics:
        tree = jax.tree.map(jnp.asarray, _nested(params))
        return _statistics(config, kind, modules, tree, batches, index)

    arrays: dict[str, QuantArray]
    reports: list[MatrixReport]
    if method.name == "gptq":
        arrays, reports = gptq_layer(params, kind, method, observe)
    else:
        arrays, reports = awq_layer(params, config, kind, method, observe)
    floats = {path: value.astype(method.dtype) for path, value in params.items()}
    named = {f"layers_{index}/{path}": value for path, value in (floats | arrays).items()}
    return LayerResult(index, named, tuple(reports))


def _statistics(
    config: ModelConfig,
    kind: LayerKind,
    modules: tuple[str, ...],
    params: Params,
    batches: list[np.ndarray],
    index: int,
) -> Statistics:
    each = (layer_statistics(config, kind, modules, params, jnp.asarray(x)) for x in batches)
    total = reduce(added, each)
    for module, found in total.items():
        if not np.isfinite(np.asarray(found.magnitude)).all():
            raise ValueError(f"what goes into {module} of layer {index} is not finite: the weights are damaged")
    return total


def _batches(samples: np.ndarray) -> list[np.ndarray]:
    """All of one shape."""
    count, length = samples.shape
    fitting = (size for size in range(2, count + 1) if count % size == 0 and size * length <= BATCH_TOKENS)
    rows = max(fitting, default=1)
    return np.split(samples, count // rows)


def _in_layer(params: Finished) -> dict[str, np.ndarray]:
    """float32, by paths in the layer."""
    return {
        path.split("/", 1)[1]: dequantized(value) if isinstance(value, QuantArray) else np.asarray(value, np.float32)
        for path, value in params.items()
    }


def _nested(params: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in params.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree
