"""From floats to a QuantArray, on the host."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxinfer.quant.array import CodedScale, QuantArray
from jaxinfer.quant.codebook import DYNAMIC, FP4, NF4, quantize_fp4, quantize_nf4, quantize_scales
from jaxinfer.quant.fp8 import quantize_fp8
from jaxinfer.quant.integer import quantize_asymmetric, quantize_int4, quantize_int8
from jaxinfer.quant.rotation import rotated
from jaxinfer.quant.storage import ROTATION, SCALES_PER_BLOCK, Storage

CHUNK_VALUES = 1 << 18  # values at a time, so that the temporaries stay in the processor's cache
LARGEST = 1e38
"""Magnitude of a value that can be quantised: 15 times its scale is a float32."""
_CODEBOOKS = {"nf4": NF4, "fp4": FP4}


def quantize(values: np.ndarray, axis: int, storage: Storage, dtype: str = "float32") -> QuantArray:
    """A matrix in a format.

    Args:
        values: the parameter, any float dtype; rounded from float32.
        axis: its first input axis; those before it are output channels.
        storage: the format.
        dtype: name of the dtype that the parameter has in floats.

    Returns:
        A QuantArray of NumPy arrays, whose inputs are in their own order (also where the format has one).

    Raises:
        ValueError: a value is NaN or beyond `LARGEST`, the group does not divide a channel, or 4 bits of an odd last
            axis.
    """
    values = np.asarray(values)
    expected = quantized_shape(values.shape, axis, storage, dtype)
    group = expected.group
    rows = values.reshape(expected.channels, expected.row)
    codes = np.empty((expected.channels, expected.row * storage.bits // 8), expected.codes.dtype)
    scales_shape = expected.channels, expected.row // group
    scale = np.empty(scales_shape, storage.scale_dtype)
    offset = None if storage.offset_dtype is None else np.empty(scales_shape, storage.offset_dtype)
    step = max(1, CHUNK_VALUES // expected.row)
    for start in range(0, len(rows), step):
        part = rows[start : start + step].astype(np.float32)
        if not (np.abs(part) <= LARGEST).all():
            raise ValueError(f"holds NaN or a value beyond {LARGEST:g} and cannot be quantised; repair the checkpoint")
        if storage.rotated:
            part = rotated(part, ROTATION)
        stop = start + len(part)
        packed, scales, *offsets = _rounding(storage)(part.reshape(-1, group))
        codes[start:stop] = (pack_nibbles(packed) if storage.bits == 4 else packed).reshape(len(part), -1)
        scale[start:stop] = scales.reshape(len(part), -1)
        if offset is not None:
            offset[start:stop] = offsets[0].reshape(len(part), -1) if offsets else 0
    return QuantArray(
        codes=codes.reshape(expected.codes.shape),
        scale=_stored_scale(scale.reshape(*values.shape[:axis], -1), storage),
        offset=None if offset is None else offset.reshape(*values.shape[:axis], -1),
        codebook=_CODEBOOKS.get(storage.kind),
        bits=storage.bits,
        group=group,
        axis=axis,
        shape=tuple(values.shape),
        dtype=dtype,
        act_bits=storage.act_bits,
        rotation=ROTATION if storage.rotated else 0,
        order=np.arange(expected.row, dtype=np.int32) if storage.ordered else None,
    )


def quantized_shape(shape: tuple[int, ...], axis: int, storage: Storage, dtype: str = "float32") -> QuantArray:
    """What `quantize` makes of a parameter of this shape, with `jax.ShapeDtypeStruct` leaves.

    Raises:
        ValueError: as `quantize`, of the shape.
    """
    row = int(np.prod(shape[axis:]))
    group = storage.group_of(row)
    if row % group or (storage.bits == 4 and shape[-1] % 2) or (storage.rotated and row % ROTATION):
        raise ValueError(f"{storage} does not fit {list(shape)}, whose channels have {row} inputs")
    spec = jax.ShapeDtypeStruct
    scales = (*shape[:axis], row // group)
    count = int(np.prod(scales))
    scale: Any = spec(scales, storage.scale_dtype)
    if storage.double:
        blocks = spec((-(-count // SCALES_PER_BLOCK),), jnp.float32)
        table = spec((len(DYNAMIC),), jnp.float32)
        scale = CodedScale(spec(scales, jnp.uint8), blocks, spec((), jnp.float32), table, scales)
    packed = storage.bits == 4
    code = {"int8": jnp.int8, "fp8": ml_dtypes.float8_e4m3fn}.get(storage.kind, jnp.uint8)
    return QuantArray(
        codes=spec((*shape[:-1], shape[-1] // 2) if packed else shape, code),
        scale=scale,
        offset=None if storage.offset_dtype is None else spec(scales, storage.offset_dtype),
        codebook=spec((16,), jnp.float32) if storage.kind in _CODEBOOKS else None,
        bits=storage.bits,
        group=group,
        axis=axis,
        shape=tuple(shape),
        dtype=dtype,
        act_bits=storage.act_bits,
        rotation=ROTATION if storage.rotated else 0,
        order=spec((row,), jnp.int32) if storage.ordered else None,
    )


def dequantized(array: QuantArray) -> np.ndarray:
    """float32 values of a QuantArray of NumPy arrays, of the parameter's shape, computed on the host."""
    codes = np.asarray(array.codes)
    if array.bits == 4:
        nibbles = unpack_nibbles(codes)
        codes = nibbles if array.codebook is None else np.asarray(array.codebook)[nibbles]
    values = codes.astype(np.float32).reshape(-1, array.group) * host_scales(array).reshape(-1, 1)
    if array.offset is not None:
        values += np.asarray(array.offset, np.float32).reshape(-1, 1)
    if array.rotation:
        values = rotated(values, array.rotation)
    if array.order is not None:
        values = values.reshape(array.channels, array.row)[:, np.argsort(array.order)]
    return values.reshape(array.shape)


def host_scales(array: QuantArray) -> np.ndarray:
    """float32 scales of a QuantArray of NumPy arrays."""
    scale = array.scale
    if not isinstance(scale, CodedScale):
        return np.asarray(scale, np.float32)
    codes = np.asarray(scale.codes).reshape(-1)
    blocks = np.repeat(np.asarray(scale.scale), SCALES_PER_BLOCK)[: codes.size]
    values: np.ndarray = np.asarray(scale.codebook)[codes] * blocks + np.asarray(scale.offset)
    return values.reshape(scale.shape)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """uint8 `[..., n / 2]` of uint8 codes `[..., n]` in 0..15: the even one in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8 `[..., n]` in 0..15 of `[..., n / 2]`."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _rounding(storage: Storage) -> Callable[[np.ndarray], tuple[np.ndarray, ...]]:
    return {
        "int8": quantize_int8,
        "int4": quantize_int4 if storage.symmetric else quantize_asymmetric,
        "fp8": quantize_fp8,
        "nf4": quantize_nf4,
        "fp4": quantize_fp4,
    }[storage.kind]


def _stored_scale(scale: np.ndarray, storage: Storage) -> np.ndarray | CodedScale:
    return coded_scales(scale) if storage.double else scale


def coded_scales(scale: np.ndarray) -> CodedScale:
    """float32 scales of a matrix in 8 bits, as double quantisation has them."""
    codes, blocks, offset = quantize_scales(scale)
    return CodedScale(codes.reshape(scale.shape), blocks, np.asarray(offset), DYNAMIC, scale.shape)
