"""Products of activations with a QuantArray on a GPU."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.quant.array import CodedScale, QuantArray
from jaxinfer.quant.int8_product import code_matrix
from pallas_kernels.dispatch import current_device
from pallas_kernels.quantized_matmul import ScaleTable, chosen_implementation, quantized_matmul

FIRST_WITH_E4M3 = (8, 9)
"""Compute capability from which tensor cores multiply float8."""


def gpu_product(
    x: jax.Array,
    weight: QuantArray,
    *,
    norm: jax.Array | None = None,
    epsilon: float | None = None,
    activation: str | None = None,
    row_maxima: jax.Array | None = None,
    gives_maxima: bool = False,
) -> Any:
    """As `project`, with what may be around a product; the other arguments are those of `quantized_matmul`. Maxima are
    of no use to a product that rounds nothing."""
    scale, table = _scales(weight)
    rounded_to = act_dtype(weight)
    return quantized_matmul(
        x,
        code_matrix(weight),
        scale,
        scale_table=table,
        offset=None if weight.offset is None else weight.offset.reshape(weight.channels, -1),
        codebook=weight.codebook,
        order=weight.order,
        bits=weight.bits,
        group=weight.group,
        norm=norm,
        epsilon=epsilon,
        activation=activation,
        act_dtype=rounded_to,
        row_maxima=None if rounded_to is None else row_maxima,
        gives_maxima=gives_maxima,
    )


def is_one_kernel(x: jax.Array, weight: QuantArray, norm: jax.Array, activation: str | None) -> bool:
    """Whether `gpu_product` with a norm, and a gate or None, is a kernel on the current device: one launch."""
    if norm.dtype != x.dtype or weight.rotation:
        return False
    scale, table = _scales(weight)
    name = chosen_implementation(
        x,
        code_matrix(weight),
        scale,
        scale_table=table,
        offset=weight.offset,
        codebook=weight.codebook,
        order=weight.order,
        bits=weight.bits,
        norm=norm,
        activation=activation,
        act_dtype=act_dtype(weight),
    )
    return name == "triton"


def act_dtype(weight: QuantArray) -> str | None:
    """What activations are rounded to for its products: the codes' own dtype, where tensor cores multiply it."""
    if weight.act_bits == 16 or weight.bits != 8 or weight.group != weight.row or weight.offset is not None:
        return None
    capability = current_device().compute_capability
    if weight.codes.dtype == jnp.float8_e4m3fn and capability is not None and capability < FIRST_WITH_E4M3:
        return None
    return str(weight.codes.dtype)


def rounds_activations(params: Any) -> bool:
    """Whether the current device rounds activations for some of a tree's products."""
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QuantArray))
    return any(isinstance(leaf, QuantArray) and act_dtype(leaf) is not None for leaf in leaves)


def _scales(weight: QuantArray) -> tuple[jax.Array, ScaleTable | None]:
    """`[N, K / group]`, and what they stand for where they are codes."""
    scale = weight.scale
    if not isinstance(scale, CodedScale):
        return scale.reshape(weight.channels, -1), None
    table = ScaleTable(scale.codebook, scale.scale, scale.offset)
    return scale.codes.reshape(weight.channels, -1), table
