"""GPTQ of a layer: its matrices one after the other, each on what those before it really give."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.calibration.layer_result import CalibratedMethod, MatrixReport
from jaxinfer.calibration.matrix import Matrix, kernels, usable
from jaxinfer.calibration.statistics import Statistics
from jaxinfer.models.config import LayerKind
from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.gptq import gptq, strongest_first
from jaxinfer.quant.grid import Grid, output_error, restored, rounded
from jaxinfer.quant.quantize import dequantized

STAGES = (
    ("attn/qkv",),
    ("attn/out",),
    ("mlp/gate_up", "mlp/up", "mlp/shared/gate_up"),
    ("mlp/down", "mlp/shared/down"),
)
"""Modules that see the same outputs of others; later ones see those of the quantised ones before."""

Observe = Callable[[dict[str, Any], tuple[str, ...]], Statistics]


def gptq_layer(
    params: dict[str, np.ndarray], kind: LayerKind, method: CalibratedMethod, observe: Observe
) -> tuple[dict[str, QuantArray], list[MatrixReport]]:
    """Quantises a layer.

    Args:
        params: floats by their paths in the layer; kernels are replaced by their quantised values on the way.
        kind: of the layer.
        method: the settings.
        observe: gives the statistics of modules in the layer with these parameters.

    Returns:
        The quantised matrices by their paths in the layer, and what it did to them.
    """
    arrays: dict[str, QuantArray] = {}
    reports: list[MatrixReport] = []
    present = kernels(params)
    for stage in STAGES:
        modules = tuple(module for module in stage if module in present)
        statistics = observe(params, modules) if modules else {}
        for module in modules:
            path = f"{module}/kernel"
            matrix = Matrix.of(module, params[path].shape, kind, method)
            found, few = usable(module, statistics)
            kernel = matrix.parts(params[path])
            arrays[path], errors = _quantised(matrix, kernel, found.gram, method)
            power, before, after = (float(error) for error in errors)
            power = max(power, 1e-30)
            reports.append(MatrixReport(path, before / power, after / power, uncalibrated=few))
            params[path] = dequantized(arrays[path])
    return arrays, reports


def _quantised(
    matrix: Matrix, kernel: np.ndarray, grams: jax.Array, method: CalibratedMethod
) -> tuple[QuantArray, jax.Array]:
    one_group = matrix.group == kernel.shape[-1]
    done = _round(
        kernel,
        grams,
        bits=matrix.bits,
        group=matrix.group,
        symmetric=matrix.symmetric,
        act_order=method.act_order,
        static_groups=method.act_order and (method.static_groups or one_group),
        # All experts' first matrices are one array of inputs, which has one order.
        narrow=method.narrow,
        one_order=not (matrix.experts and matrix.axis == 1),
        damping=method.damping,
    )
    order = None if done.order is None else np.asarray(done.order)
    return matrix.stored(done.codes, done.grid, order, method.dtype), done.errors


class _Rounded(NamedTuple):
    """A matrix's codes ``[E, N, K]``, grid, and order, int32[E, K] or [1, K], if they are in one; the outputs' power,
    and their errors after rounding to nearest and after this."""

    codes: jax.Array
    grid: Grid
    order: jax.Array | None
    errors: jax.Array


@partial(
    jax.jit,
    static_argnames=("bits", "group", "symmetric", "act_order", "static_groups", "narrow", "one_order", "damping"),
)
def _round(
    kernel: jax.Array,
    grams: jax.Array,
    *,
    bits: int,
    group: int,
    symmetric: bool,
    act_order: bool,
    static_groups: bool,
    narrow: bool,
    one_order: bool,
    damping: float,
) -> _Rounded:
    strengths = jnp.broadcast_to(grams.sum(0), grams.shape) if one_order else grams
    order = jax.vmap(strongest_first)(strengths)
    nearest = partial(rounded, bits=bits, group=group, symmetric=symmetric)

    def of_expert(expert: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, Grid, jax.Array]:
        weights, gram, order = expert
        codes, grid = gptq(
            weights,
            gram,
            order if act_order else None,
            bits=bits,
            group=group,
            symmetric=symmetric,
            static_groups=static_groups,
            narrow=narrow,
            damping=damping,
        )
        values = restored(codes, grid)
        if act_order and not static_groups:
            values = values[:, jnp.argsort(order)]
        changes = weights, restored(*nearest(weights)) - weights, values - weights
        return codes, grid, jnp.stack([output_error(change, gram).sum() for change in changes])

    codes, grid, errors = jax.lax.map(of_expert, (kernel, grams, order))
    kept = order[:1] if one_order else order
    return _Rounded(codes, grid, kept if act_order and not static_groups else None, errors.sum(0))
