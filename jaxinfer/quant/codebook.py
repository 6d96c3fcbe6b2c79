"""bitsandbytes' 4-bit tables NF4 and FP4, and its quantisation of the scales. NumPy.

NF4 is the table of arXiv:2305.14314, appendix E. Which entry a value becomes follows bitsandbytes' kernels: the
nearest, and the lower one in the middle between two. Blocks run along a channel, where bitsandbytes' run through the
whole matrix; they are the same where the block divides a channel.
"""

import numpy as np

NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
_FP4_TWELFTHS = [0, 0.0625, 8, 12, 4, 6, 2, 3]
FP4 = np.array([*_FP4_TWELFTHS, *(-value for value in _FP4_TWELFTHS)], np.float32) / np.float32(12)
"""A sign bit, and the magnitude by the other three."""

DYNAMIC = np.sort(
    np.concatenate(
        [
            [0, 1],
            *(
                sign * 10.0 ** (decade - 6) * (0.1 + 0.9 * (2 * np.arange(2**decade) + 1) / 2 ** (decade + 1))
                for decade in range(7)
                for sign in (1, -1)
            ),
        ]
    )
).astype(np.float32)
"""The 256 values of bitsandbytes' signed dynamic type: 0, 1, and seven decades up to 1, each with twice as many values
as the one below it, halfway between even marks."""
SCALE_BLOCK = 256


def quantize_nf4(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices into `NF4`, and each group's largest magnitude as its scale.

    Args:
        groups: float32 `[groups, values]`, finite.

    Returns:
        uint8 codes of that shape, float32 scales `[groups]`. A group of zeros has the scale 0.
    """
    scaled, scale = _scaled(groups)
    return _nearest(scaled, NF4), scale


def quantize_fp4(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Like `quantize_nf4`, with indices into `FP4`; a magnitude in the middle goes to the smaller one."""
    scaled, scale = _scaled(groups)
    order = np.argsort(FP4[:8]).astype(np.uint8)
    codes = order[_nearest(np.abs(scaled), FP4[:8][order])]
    return codes + np.where(scaled < 0, np.uint8(8), np.uint8(0)), scale


def quantize_scales(scale: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Scales as codes of 8 bits: ``DYNAMIC[code] * block_scale + offset`` with the mean as offset.

    Args:
        scale: float32, any shape; blocks of `SCALE_BLOCK` go through it in C order.

    Returns:
        uint8 codes `[scale.size]`, float32 block scales, offset.
    """
    offset = scale.mean(dtype=np.float32)
    centred = scale.reshape(-1) - offset
    blocks = -(-centred.size // SCALE_BLOCK)
    padded = np.zeros(blocks * SCALE_BLOCK, np.float32)
    padded[: centred.size] = centred
    scaled, block_scale = _scaled(padded.reshape(blocks, SCALE_BLOCK))
    middles = (DYNAMIC[1:] + DYNAMIC[:-1]) / 2
    codes = np.searchsorted(middles, scaled.reshape(-1)[: centred.size], side="left")
    return codes.astype(np.uint8), block_scale, offset


def _nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Index of the nearest entry of a short ascending table, of two equally near the lower one."""
    codes = np.zeros(values.shape, np.uint8)
    for middle in (table[1:] + table[:-1]) / 2:  # several times as fast as a search
        codes += values > middle
    return codes


def _scaled(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values over their group's largest magnitude, multiplied with its inverse as bitsandbytes does; that magnitude."""
    scale = np.abs(groups).max(axis=1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scale
    inverse = np.where(np.isfinite(inverse), inverse, np.float32(0))  # nothing but zeros, or what is flushed to them
    return np.clip(groups * inverse[:, None], -1, 1), scale
