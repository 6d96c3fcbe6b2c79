"""Integer codes: of 8 bits, and of 4 bits with or without a zero point of each group. NumPy.

All rounding is to nearest, ties to even, and every value is within half a scale of what is stored for it.
"""

import ml_dtypes
import numpy as np

TINY = np.finfo(np.float32).tiny
Rounded = tuple[np.ndarray, np.ndarray, np.ndarray]


def quantize_int8(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes ``round(value / scale)`` in -127..127, with ``scale = max |value| / 127``.

    Where all values of a group are 0, or so small that the scale would be flushed to 0, it is 1 and the codes are 0.

    Args:
        groups: float32 `[groups, values]`, finite.

    Returns:
        int8 codes of that shape, float32 scales `[groups]`.
    """
    scale = np.abs(groups).max(axis=1) / np.float32(127)
    scale = np.where(scale < TINY, np.float32(1), scale)
    codes = np.rint(groups / scale[:, None])
    return np.clip(codes, -127, 127).astype(np.int8), scale.astype(np.float32)


def quantize_int4(groups: np.ndarray) -> Rounded:
    """Codes ``8 + round(value / scale)`` in 1..15; ``value = code * scale + offset`` with the offset ``-8 * scale``.

    The scale is ``max |value| / 7``, rounded up to bfloat16, or 1 as for `quantize_int8`.

    Args:
        groups: float32 `[groups, values]`, finite.

    Returns:
        uint8 codes of that shape, bfloat16 scales and offsets `[groups]`.
    """
    scale = _short(np.abs(groups).max(axis=1) / np.float32(7))
    codes = np.clip(np.rint(groups / scale[:, None]), -7, 7) + 8
    return codes.astype(np.uint8), scale.astype(ml_dtypes.bfloat16), (-8 * scale).astype(ml_dtypes.bfloat16)


def quantize_asymmetric(groups: np.ndarray) -> Rounded:
    """Codes 0..15 with ``value = code * scale + offset``, and the offset ``-zero * scale`` with a whole zero point, so
    that 0 is stored exactly.

    The scale is a 15th of the range from the least to the largest value, which is widened to hold 0; rounded up to
    bfloat16, or 1 as for `quantize_int8`.

    Args:
        groups: float32 `[groups, values]`, finite.

    Returns:
        uint8 codes of that shape, bfloat16 scales and float32 offsets `[groups]`.
    """
    low, high = np.minimum(groups.min(axis=1), 0), np.maximum(groups.max(axis=1), 0)
    scale = _short(high / np.float32(15) - low / np.float32(15))  # their difference might overflow
    zero = np.clip(np.rint(-low / scale), 0, 15).astype(np.float32)
    codes = np.clip(np.rint(groups / scale[:, None]) + zero[:, None], 0, 15)
    return codes.astype(np.uint8), scale.astype(ml_dtypes.bfloat16), -zero * scale


def _short(scale: np.ndarray) -> np.ndarray:
    """Rounded up to a float32 that is a bfloat16, so that its product with a code is exact; 1 for what is tiny."""
    bits = np.ascontiguousarray(scale, np.float32).view(np.uint32)
    short = ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(scale < TINY, np.float32(1), short)
