"""Products of activations with a QuantArray."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.cpu_matmul import cpu_product
from jaxinfer.quant.gpu_matmul import gpu_product
from jaxinfer.quant.rotation import rotate


def project(x: jax.Array, weight: QuantArray, row_maxima: jax.Array | None = None) -> jax.Array:
    """``x[T, K] . weight[N, K]^T``, ``[T, N]`` in x's dtype, accumulated in int32 or float32.

    `row_maxima`: float32[any, T], whose largest is that of a row of ``|x|``, for a GPU that rounds rows of x; None
    where they are not known.
    """
    if weight.rotation:
        x, weight, row_maxima = rotate(x, weight.rotation), replace(weight, rotation=0), None
    on_gpu = partial(gpu_product, row_maxima=row_maxima)
    return lax.platform_dependent(x, weight, cpu=_on_cpu, default=on_gpu)


def _on_cpu(x: jax.Array, weight: QuantArray) -> jax.Array:
    if weight.order is not None:
        x, weight = jnp.take(x, weight.order, axis=1, mode="clip"), replace(weight, order=None)
    return cpu_product(x, weight)
