"""Products of activations with a QuantArray."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.cpu_matmul import cpu_product
from jaxinfer.quant.gpu_matmul import gpu_product


def project(x: jax.Array, weight: QuantArray) -> jax.Array:
    """``x[T, K] . weight[N, K]^T``, ``[T, N]`` in x's dtype, accumulated in int32 or float32."""
    if weight.order is not None:
        x, weight = jnp.take(x, weight.order, axis=1, mode="clip"), replace(weight, order=None)
    return lax.platform_dependent(x, weight, cpu=cpu_product, default=gpu_product)
