"""Products of activations with a QuantArray."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.cpu_matmul import cpu_product
from jaxinfer.quant.gpu_matmul import act_dtype, gpu_product
from jaxinfer.quant.int8_product import largest_magnitudes
from jaxinfer.quant.rotation import rotate


def project(
    x: jax.Array, weight: QuantArray, row_maxima: jax.Array | None = None, split_over: str | None = None
) -> jax.Array:
    """``x[T, K] . weight[N, K]^T``, ``[T, N]`` in x's dtype, accumulated in int32 or float32.

    Args:
        x, weight: K is of one device where inputs are split.
        row_maxima: float32[any, T], whose largest is that of a row of ``|x|``, where rows of x are rounded; None where
            they are not known.
        split_over: inside `jax.shard_map`, the mesh axis over which the inputs are split. Where rows of x are rounded,
            all devices round with the scale of the whole row, as one device would: they agree on its largest value.
    """
    if weight.rotation:
        x, weight, row_maxima = rotate(x, weight.rotation), replace(weight, rotation=0), None
    if split_over is not None and act_dtype(weight) is not None:
        own = largest_magnitudes(x) if row_maxima is None else row_maxima.max(0)
        row_maxima = lax.pmax(own, split_over)[None]
    on_cpu, on_gpu = (partial(function, row_maxima=row_maxima) for function in (_on_cpu, gpu_product))
    return lax.platform_dependent(x, weight, cpu=on_cpu, default=on_gpu)


def _on_cpu(x: jax.Array, weight: QuantArray, row_maxima: jax.Array | None) -> jax.Array:
    if weight.order is not None:
        x, weight = jnp.take(x, weight.order, axis=1, mode="clip"), replace(weight, order=None)
    return cpu_product(x, weight, row_maxima)
