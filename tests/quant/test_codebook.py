"""NF4, FP4 and quantised scales against what bitsandbytes publishes: its tables, its kernels' thresholds, its rule."""

import numpy as np
import pytest

from jaxinfer.quant.codebook import DYNAMIC, FP4, NF4, quantize_fp4, quantize_nf4, quantize_scales
from jaxinfer.quant.quantize import dequantized, host_scales, quantize
from jaxinfer.quant.storage import Storage

# arXiv:2305.14314, appendix E.
PUBLISHED_NF4 = """
-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334
-0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0
"""
# bitsandbytes' kernel dQuantizeNF4: a value above the n-th of these, not on it, has at least the code n + 1.
NF4_THRESHOLDS = """
-0.8480964004993439 -0.6106329262256622 -0.4599952697753906 -0.33967943489551544 -0.23460740596055984
-0.13791173323988914 -0.045525018125772476 0.03979014977812767 0.1202552504837513 0.2035212516784668
0.2920137718319893 0.3893125355243683 0.5016634166240692 0.6427869200706482 0.8614784181118011
"""
# bitsandbytes' kernel dQuantizeFP4: a magnitude above the threshold has the code.
FP4_THRESHOLDS = [(0.0, 0), (0.00260417, 1), (0.0859375, 6), (0.20833333, 7), (0.29166667, 4), (0.4166667, 5)]
FP4_THRESHOLDS += [(0.583333, 2), (0.8333333, 3)]


def numbers(text: str) -> np.ndarray:
    return np.array([float(word) for word in text.split()], np.float32)


def test_nf4_is_the_published_table() -> None:
    np.testing.assert_array_equal(NF4, numbers(PUBLISHED_NF4))


def test_nf4_codes_change_at_the_kernels_thresholds() -> None:
    thresholds = numbers(NF4_THRESHOLDS)
    above = np.nextafter(thresholds, np.float32(2))
    below = np.nextafter(thresholds, np.float32(-2))
    block = np.concatenate([thresholds, above, below, [1.0]]).astype(np.float32)[None]
    codes, scale = quantize_nf4(block)
    n = np.arange(15)
    np.testing.assert_array_equal(codes[0], [*n, *(n + 1), *n, 15])
    assert scale[0] == 1


@pytest.mark.parametrize("sign", [1, -1])
def test_fp4_codes_change_at_the_kernels_thresholds(sign: int) -> None:
    for (low, code), (high, _) in zip(FP4_THRESHOLDS, [*FP4_THRESHOLDS[1:], (1.0, 3)], strict=True):
        inside = np.array([[low + 1e-6, (low + high) / 2, high - 1e-6, 1.0]], np.float32) * sign
        codes, _ = quantize_fp4(inside)
        np.testing.assert_array_equal(codes[0, :3], code + (8 if sign < 0 else 0))


def test_fp4_is_the_published_table() -> None:
    magnitudes = np.array([0, 0.0052083333, 0.6666667, 1, 0.33333333, 0.5, 0.16666667, 0.25], np.float32)
    np.testing.assert_allclose(FP4, np.concatenate([magnitudes, -magnitudes]), rtol=1e-6)


def test_nf4_by_hand() -> None:
    values = np.zeros((1, 64), np.float32)
    values[0, :4] = [-2.0, 1.0, 0.16, -0.1]  # over 2: -1, 0.5, 0.08, -0.05
    array = quantize(values, 1, Storage("nf4", 64))
    np.testing.assert_array_equal(array.codes[0, :2], [0 | 12 << 4, 8 | 6 << 4])
    expected = np.array([-1, 0.44070982933044434, 0.07958029955625534, -0.09105003625154495], np.float32) * 2
    np.testing.assert_array_equal(dequantized(array)[0, :4], expected)
    assert (dequantized(array)[0, 4:] == 0).all()


def test_the_dynamic_type() -> None:
    """arXiv:1511.04561: a sign, zeros that count decades, and the rest of the bits for the fraction."""
    assert DYNAMIC.shape == (256,) and (np.diff(DYNAMIC) > 0).all()
    assert DYNAMIC[127] == 0 and DYNAMIC[255] == 1
    np.testing.assert_array_equal(-DYNAMIC[:127][::-1], DYNAMIC[128:255])
    np.testing.assert_allclose(DYNAMIC[128:131], [0.55e-6, 3.25e-6, 7.75e-6], rtol=1e-6)
    np.testing.assert_allclose(DYNAMIC[[191, 254]], [0.1 + 0.9 / 128, 1 - 0.9 / 128], rtol=1e-6)


def test_quantised_scales_follow_the_naive_rule() -> None:
    scale = np.random.default_rng(0).uniform(0.01, 0.2, (20, 15)).astype(np.float32)  # a block of 256 and one of 44
    codes, blocks, offset = quantize_scales(scale)
    assert offset == pytest.approx(scale.mean(), rel=1e-6) and blocks.shape == (2,)
    centred = (scale - offset).reshape(-1)
    for start in (0, 256):
        block = centred[start : start + 256]
        largest = np.abs(block).max()
        assert blocks[start // 256] == pytest.approx(largest, rel=1e-6)
        nearest = np.abs(block[:, None] / largest - DYNAMIC[None]).argmin(1)
        assert (codes[start : start + 256] == nearest).mean() > 0.99  # float32 decides what lies in the middle
    array = quantize(np.repeat(scale, 64, axis=1), 1, Storage("nf4", 64, double=True))
    np.testing.assert_allclose(host_scales(array), scale, atol=0.9 / 128 * np.abs(centred).max() + 1e-6, rtol=0)


def test_equal_scales_are_kept() -> None:
    array = quantize(np.full((2, 128), 0.3, np.float32), 1, Storage("nf4", 64, double=True))
    np.testing.assert_allclose(dequantized(array), 0.3, rtol=1e-6)
