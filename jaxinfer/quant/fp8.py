"""float8_e4m3fn codes with a scale a group. NumPy."""

import ml_dtypes
import numpy as np

from jaxinfer.quant.integer import TINY

LIMIT = 448
"""The largest float8_e4m3fn; what lies above it would become NaN."""


def quantize_fp8(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``value / scale`` rounded to the nearest float8_e4m3fn, ties to even, with ``scale = max |value| / 448``.

    Args:
        groups: float32 `[groups, values]`, finite.

    Returns:
        float8_e4m3fn codes of that shape, float32 scales `[groups]`, 1 where all values are 0 or vanishingly small.
    """
    scale = np.abs(groups).max(axis=1) / np.float32(LIMIT)
    scale = np.where(scale < TINY, np.float32(1), scale).astype(np.float32)
    codes = np.clip(groups / scale[:, None], -LIMIT, LIMIT)
    return codes.astype(ml_dtypes.float8_e4m3fn), scale
