"""AWQ of a layer: scales of its matrices' inputs, folded into what makes them, then limits of the weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.calibration.fold import Fold, divide, foldable_scale, folds, output_scale, shared_magnitude
from jaxinfer.calibration.layer_result import CalibratedMethod, MatrixReport
from jaxinfer.calibration.matrix import Matrix, kernels, usable
from jaxinfer.calibration.statistics import Statistics
from jaxinfer.models.config import LayerKind, ModelConfig
from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.awq import clipped, scaled_error, search_scales
from jaxinfer.quant.grid import Grid, output_error, restored, rounded

Observe = Callable[[dict[str, Any], tuple[str, ...]], Statistics]


@dataclass
class _Subject:
    """A matrix on its way.

    Attributes:
        matrix: its format.
        weights: float32[E, N, K], as they came.
        gram: of the inputs as they came, float32[E, K, K].
        magnitude: their means, float32[E, K].
        few: experts without statistics.
        inputs, outputs: float32[E, K] that the weights are multiplied by, and [E, N] that they are divided by.
        foldable, ratio: see `MatrixReport`.
    """

    matrix: Matrix
    weights: jax.Array
    gram: jax.Array
    magnitude: np.ndarray
    few: tuple[int, ...]
    inputs: np.ndarray
    outputs: np.ndarray
    foldable: bool = False
    ratio: float = 0.0


def awq_layer(
    params: dict[str, np.ndarray], config: ModelConfig, kind: LayerKind, method: CalibratedMethod, observe: Observe
) -> tuple[dict[str, QuantArray], list[MatrixReport]]:
    """Quantises a layer.

    Args:
        params: floats by their paths in the layer; norms, biases and routers that scales go into are replaced.
        config: the architecture.
        kind: of the layer.
        method: the settings.
        observe: gives the statistics of modules in the layer with these parameters.

    Returns:
        The quantised matrices by their paths in the layer, and what it did to them.
    """
    modules = kernels(params)
    statistics = observe(params, tuple(modules))
    subjects = {module: _subject(module, params, kind, method, statistics) for module in modules}
    for fold in folds(config, kind, params):
        _scale(fold, subjects, params, config, method.dtype)
    arrays, reports = {}, []
    for module, subject in subjects.items():
        path, matrix = f"{module}/kernel", subject.matrix
        done = _round(
            subject.weights,
            subject.gram,
            subject.inputs,
            subject.outputs,
            _clippable(matrix, config),
            bits=matrix.bits,
            group=matrix.group,
            symmetric=matrix.symmetric,
        )
        arrays[path] = matrix.stored(done.codes, done.grid, None, method.dtype)
        reports.append(_report(path, subject, done))
    return arrays, reports


def _subject(
    module: str, params: dict[str, np.ndarray], kind: LayerKind, method: CalibratedMethod, statistics: Statistics
) -> _Subject:
    path = f"{module}/kernel"
    matrix = Matrix.of(module, params[path].shape, kind, method)
    weights = matrix.parts(params[path])
    found, few = usable(module, statistics)
    experts, outputs, inputs = weights.shape
    return _Subject(
        matrix=matrix,
        weights=jnp.asarray(weights),
        gram=jnp.asarray(found.gram),
        magnitude=np.asarray(found.magnitude) / np.asarray(found.tokens)[:, None],
        few=few,
        inputs=np.ones((experts, inputs), np.float32),
        outputs=np.ones((experts, outputs), np.float32),
    )


def _scale(
    fold: Fold, subjects: dict[str, _Subject], params: dict[str, np.ndarray], config: ModelConfig, dtype: str
) -> None:
    """Searches the scale of a fold, and multiplies and divides by it where it makes nothing worse."""
    consumers = [subjects[module] for module in fold.consumers]
    weights, grams = (tuple(getattr(one, name) for one in consumers) for name in ("weights", "gram"))
    groups = tuple(one.matrix.group for one in consumers)
    magnitude = shared_magnitude(config, fold.source, consumers[0].magnitude)
    found = search_scales(weights, grams, magnitude, group=groups)
    wanted = np.array(found.scale)
    scale = foldable_scale(config, fold.source, params, wanted, dtype)
    ratio = float(found.ratio)
    if ratio and not np.array_equal(scale, wanted):
        errors = [
            float(scaled_error(*pair, scale, group=group)) for *pair, group in zip(weights, grams, groups, strict=True)
        ]
        ratio = 0.0 if (np.array(errors) > np.asarray(found.unscaled)).any() else ratio
    for subject in consumers:
        subject.foldable, subject.ratio = True, ratio
        if ratio:
            subject.inputs = subject.inputs * scale
    if not ratio:
        return
    divide(config, fold.source, params, scale, dtype)
    if fold.source in subjects:
        source = subjects[fold.source]
        divisor = output_scale(fold.source, source.matrix.shape[: source.matrix.axis], scale)
        source.outputs = source.outputs * source.matrix.outputs(divisor)
    for module in fold.unquantised:
        params[f"{module}/kernel"] = params[f"{module}/kernel"] * scale[0]


def _clippable(matrix: Matrix, config: ModelConfig) -> np.ndarray:
    """bool[N]: all but queries and keys. Attention sees the products of these two: smaller ones on either side flatten
    all of its distributions, which the error of neither's output says. (AutoAWQ leaves them alone, too.)"""
    outputs = matrix.shape[: matrix.axis]
    if matrix.module != "attn/qkv":
        return np.ones(int(np.prod(outputs)) // (outputs[1] if matrix.experts and len(outputs) > 1 else 1), bool)
    rows = np.zeros(outputs, bool)
    rows[:, -1] = True
    return rows.reshape(-1)


class _Rounded(NamedTuple):
    """A matrix's codes ``[E, N, K]`` and grid; its outputs' power, and their errors, in the units that they came in:
    rounded as it came, with scales only, and as it is."""

    codes: jax.Array
    grid: Grid
    errors: jax.Array


@partial(jax.jit, static_argnames=("bits", "group", "symmetric"))
def _round(
    weights: jax.Array,
    gram: jax.Array,
    inputs: jax.Array,
    outputs: jax.Array,
    clippable: jax.Array,
    *,
    bits: int,
    group: int,
    symmetric: bool,
) -> _Rounded:
    """Clips and rounds ``weights * inputs / outputs``; 8 bits need no clipping."""
    nearest = partial(rounded, bits=bits, group=group, symmetric=symmetric)
    by_input, by_output = inputs[:, None, :], outputs[:, :, None]
    scaled = weights * by_input / by_output
    if bits == 4:
        cut = clipped(scaled, gram / (by_input * by_input.swapaxes(1, 2)), group=group)
        codes, grid = nearest(jnp.where(clippable[:, None], cut, scaled))
    else:
        codes, grid = nearest(scaled)
    changes = (
        weights,
        restored(*nearest(weights)) - weights,
        restored(*nearest(weights * by_input)) / by_input - weights,
        restored(codes, grid) * by_output / by_input - weights,
    )
    return _Rounded(codes, grid, jnp.stack([output_error(change, gram).sum() for change in changes]))


def _report(path: str, subject: _Subject, done: _Rounded) -> MatrixReport:
    power, *errors = (float(error) for error in done.errors)
    before, scaled, after = (error / max(power, 1e-30) for error in errors)
    return MatrixReport(
        path,
        before,
        after,
        scaled=scaled,
        foldable=subject.foldable,
        ratio=subject.ratio,
        uncalibrated=subject.few,
    )
