"""Whole zero points, which public formats store, and the offsets that a QuantArray has instead."""

from typing import Any

import numpy as np

from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.quantize import host_scales


def half_scales(array: QuantArray) -> np.ndarray:
    """float16 scales ``[N, K / group]``.

    Raises:
        ValueError: one is not a float16.
    """
    exact = host_scales(array).reshape(array.channels, -1)
    with np.errstate(over="ignore"):
        scale = exact.astype(np.float16)
    if not np.array_equal(scale.astype(np.float32), exact):
        raise ValueError("scales are stored in float16, and one of these is between two of them or out of their range")
    return scale


def zero_points(array: QuantArray, scale: np.ndarray, middle: int, largest: int) -> np.ndarray:
    """uint8 zero points ``[N, K / group]`` with ``value = (code - zero) * scale``; `middle` where the scale is 0.

    Args:
        array: a matrix.
        scale: its scales ``[N, K / group]``.
        middle: what is added to its codes.
        largest: zero point.

    Raises:
        ValueError: an offset is no whole multiple of its scale, or too large a one.
    """
    if array.offset is None:
        return np.full(scale.shape, middle, np.uint8)
    scale = scale.astype(np.float32)
    offset: Any = np.asarray(array.offset, np.float32).reshape(scale.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        zero = np.where(scale == 0, np.float32(0), np.rint(-offset / scale))
    near = np.abs(-zero * scale - offset) <= np.abs(scale) * np.float32(2**-6)  # 16-bit offsets are rounded
    zero += middle
    if not near.all() or not ((zero >= 0) & (zero <= largest)).all():
        raise ValueError(f"zero points are whole numbers of 0 to {largest}, and these offsets are none times the scale")
    return zero.astype(np.uint8)


def offsets_of(zero: np.ndarray, scale: np.ndarray, suffix: str, dtype: str = "float32") -> np.ndarray:
    """``-zero * scale``, exactly.

    Args:
        zero: zero points, of any dtype.
        scale: of the same shape.
        suffix: of the tensor of scales, for the message.
        dtype: of the result.

    Raises:
        ValueError: one is beyond the dtype.
    """
    with np.errstate(over="ignore"):
        offset: np.ndarray = (-zero.astype(np.float32) * scale.astype(np.float32)).astype(dtype)
    if not np.isfinite(offset).all():
        raise ValueError(f"{suffix} holds a value that times its zero point is beyond {dtype}; repair the checkpoint")
    return offset
