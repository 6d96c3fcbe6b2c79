"""Products of activations with a QuantArray on a GPU."""

import jax
import jax.numpy as jnp

from jaxinfer.quant.array import CodedScale, QuantArray, scales_of
from jaxinfer.quant.int8_product import channel_scales, code_matrix, dot, int8_product, is_channel_int8
from pallas_kernels.quantized_matmul import quantized_matmul


def gpu_product(x: jax.Array, weight: QuantArray) -> jax.Array:
    """As `project`: W8A8 and fp8 in plain XLA, which fuses what is per channel; all else in the kernel."""
    if is_channel_int8(weight) and weight.act_bits == 8:
        return int8_product(x, weight).astype(x.dtype)
    matrix = code_matrix(weight)
    if matrix.dtype == jnp.float8_e4m3fn:
        return (dot(x, matrix.astype(x.dtype), jnp.float32) * channel_scales(weight)).astype(x.dtype)
    scale = scales_of(weight) if isinstance(weight.scale, CodedScale) else weight.scale
    return quantized_matmul(
        x,
        matrix,
        scale.reshape(weight.channels, -1),
        offset=None if weight.offset is None else weight.offset.reshape(weight.channels, -1),
        codebook=weight.codebook,
        bits=weight.bits,
        group=weight.group,
    )
