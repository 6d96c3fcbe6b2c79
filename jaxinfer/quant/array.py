"""QuantArray: a quantised matrix, as a leaf type of the parameter tree."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.quant.rotation import rotate

Array = Any
"""A jax.Array, a numpy array, or a `jax.ShapeDtypeStruct`."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scale", "offset", "codebook", "order"],
    meta_fields=["bits", "group", "axis", "shape", "dtype", "act_bits", "rotation"],
)
@dataclass(frozen=True)
class QuantArray:
    """A matrix of N output channels and K inputs, stored as codes; its axes are those of the float parameter.

    ``value[n, k] = code[n, k] * scale[n, k // group] + offset[n, k // group]``, with ``codebook[code]`` in place of the
    code where there is a codebook, and no offset where it is None. Outputs and inputs may have several axes each
    (``shape[:axis]`` and ``shape[axis:]``), so that fused parameters shard as they do in floats.

    Attributes:
        codes: int8 or float8_e4m3fn `[*shape]`; of 4 bits uint8 `[*shape[:-1], shape[-1] / 2]`, two codes 0..15 a byte,
            that of the even input in the low nibble.
        scale: floats `[*shape[:axis], K / group]`, or a `CodedScale` of these.
        offset: like `scale`, or None.
        codebook: float32[16], or None.
        bits: of a code, 8 or 4.
        group: inputs that share a scale; K for all of a channel.
        axis: the first input axis of `shape`.
        shape: of the float parameter.
        dtype: its dtype's name, which activations made from it have.
        act_bits: 8 if activations are rounded to the codes' dtype for the product, where the device has products of
            such numbers; else 16.
        order: int32[K], a permutation: what is stored as input j of a channel is the parameter's input ``order[j]``
            (GPTQ's act-order); or None for as they are.
        rotation: blocks of so many inputs are stored multiplied by `rotation.hadamard`, and activations are rotated
            likewise for the product; 0 for as they are. Not together with an order.
    """

    codes: Array
    scale: "Array | CodedScale"
    offset: Array | None
    codebook: Array | None
    bits: int
    group: int
    axis: int
    shape: tuple[int, ...]
    dtype: str = "float32"
    act_bits: int = 16
    order: Array | None = None
    rotation: int = 0

    @property
    def channels(self) -> int:
        """N."""
        return math.prod(self.shape[: self.axis])

    @property
    def row(self) -> int:
        """K."""
        return math.prod(self.shape[self.axis :])

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, offsets, codebook and order."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scale", "offset", "codebook"], meta_fields=["shape"])
@dataclass(frozen=True)
class CodedScale:
    """Scales of a matrix in 8 bits (double quantisation, arXiv:2305.14314): ``codebook[code] * scale + offset``.

    Attributes:
        codes: uint8, one for each scale, in their shape.
        scale: float32[ceil(size / 256)], for each 256 scales in C order.
        offset: float32[], the mean of the scales.
        codebook: float32[256], ascending.
        shape: of the scales.
    """

    codes: Array
    scale: Array
    offset: Array
    codebook: Array
    shape: tuple[int, ...]


def scales_of(array: QuantArray) -> jax.Array:
    """float32 scales `[*shape[:axis], K / group]`, decoded where they are codes."""
    scale = array.scale
    if not isinstance(scale, CodedScale):
        return jnp.asarray(scale, jnp.float32)
    values = jnp.take(scale.codebook, scale.codes.reshape(-1).astype(jnp.int32), mode="clip")
    return (values * jnp.repeat(scale.scale, 256)[: values.size] + scale.offset).reshape(scale.shape)


def code_values(array: QuantArray, dtype: Any = jnp.float32) -> jax.Array:
    """What the codes stand for before scaling, ``[N, K]`` of `dtype`."""
    codes = jnp.asarray(array.codes).reshape(array.channels, -1)
    if array.bits == 8:
        return codes.astype(dtype)
    nibbles = (codes[:, :, None] >> jnp.array([0, 4], jnp.uint8)) & 15
    nibbles = nibbles.reshape(array.channels, array.row)
    if array.codebook is None:
        return nibbles.astype(dtype)
    return jnp.take(jnp.asarray(array.codebook).astype(dtype), nibbles.astype(jnp.int32), mode="clip")


def take_rows(array: QuantArray, ids: jax.Array) -> jax.Array:
    """The values of some output channels, ``[*ids.shape, K]`` of the parameter's dtype: what an embedding looks up.

    Args:
        array: a matrix of two axes whose scales are not codes.
        ids: int32, any shape; those out of range are clipped.
    """

    def rows(leaf: jax.Array | None) -> jax.Array | None:
        return None if leaf is None else jnp.take(leaf, ids.reshape(-1), axis=0, mode="clip")

    taken = replace(
        array,
        codes=rows(array.codes),
        scale=rows(scales_of(array)),
        offset=rows(array.offset),
        shape=(ids.size, array.row),
    )
    return dequantize(taken, array.dtype).reshape(*ids.shape, array.row)


def dequantize(array: QuantArray, dtype: Any = jnp.float32) -> jax.Array:
    """The values as an array of `dtype` and of the parameter's shape; computed in float32."""
    groups = code_values(array).reshape(array.channels, -1, array.group)
    values = groups * scales_of(array).reshape(array.channels, -1, 1)
    if array.offset is not None:
        values = values + jnp.asarray(array.offset, jnp.float32).reshape(array.channels, -1, 1)
    if array.rotation:
        values = rotate(values.reshape(array.channels, array.row), array.rotation)
    values = values.astype(dtype)
    if array.order is not None:
        values = jnp.take(values.reshape(array.channels, array.row), jnp.argsort(array.order), axis=1)
    return values.reshape(array.shape)
