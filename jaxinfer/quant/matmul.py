"""Products of activations with a QuantArray."""

import jax
from jax import lax

from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.cpu_matmul import cpu_product
from jaxinfer.quant.gpu_matmul import gpu_product


def project(x: jax.Array, weight: QuantArray) -> jax.Array:
    """``x[T, K] . weight[N, K]^T``, ``[T, N]`` in x's dtype, accumulated in int32 or float32."""
    return lax.platform_dependent(x, weight, cpu=cpu_product, default=gpu_product)
