"""Integer codes: symmetric of 8 or 4 bits, asymmetric of 4 bits. NumPy.

All rounding is to nearest, ties to even, and every value is within half a scale of what is stored for it.
"""

import numpy as np

TINY = np.finfo(np.float32).tiny
SHORT_MANTISSA = np.uint32(0xFFFFFFF0)
"""Clears the last 4 bits of a float32, so that its product with a code of 4 bits is exact."""


def quantize_symmetric(groups: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes ``round(value / scale)`` in -limit..limit, with ``scale = max |value| / limit``.

    Where all values of a group are 0, or so small that the scale would be flushed to 0, it is 1 and the codes are 0.

    Args:
        groups: float32 `[groups, values]`, finite.
        limit: 127 for 8 bits, 7 for 4.

    Returns:
        int8 codes of that shape, float32 scales `[groups]`.
    """
    scale = np.abs(groups).max(axis=1) / np.float32(limit)
    with np.errstate(over="ignore"):
        too_large = np.isinf(scale * np.float32(limit))  # the division has rounded up at the end of the range
    scale = np.where(too_large, np.nextafter(scale, np.float32(0)), np.where(scale < TINY, np.float32(1), scale))
    codes = np.rint(groups / scale[:, None])
    return np.clip(codes, -limit, limit).astype(np.int8), scale.astype(np.float32)


def quantize_asymmetric(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes 0..15 and a scale and an offset a group: ``value = code * scale + offset``.

    The scale is a 15th of the range from the least to the largest value, which is widened to hold 0; the offset is
    ``-zero * scale`` with a whole zero point, so that 0 is stored exactly. The scale's last 4 bits are cleared for
    that; a range that would be flushed to 0 has the scale 1.

    Args:
        groups: float32 `[groups, values]`, finite.

    Returns:
        uint8 codes of that shape, float32 scales and offsets `[groups]`.
    """
    low, high = np.minimum(groups.min(axis=1), 0), np.maximum(groups.max(axis=1), 0)
    scale = high / np.float32(15) - low / np.float32(15)  # their difference might overflow
    scale = np.where(scale < TINY, np.float32(1), scale).astype(np.float32)
    scale = (scale.view(np.uint32) & SHORT_MANTISSA).view(np.float32)
    zero = np.clip(np.rint(-low / scale), 0, 15).astype(np.float32)
    codes = np.clip(np.rint(groups / scale[:, None]) + zero[:, None], 0, 15)
    return codes.astype(np.uint8), scale, -zero * scale
