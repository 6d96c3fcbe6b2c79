"""What is stored for a value is as near as its format allows, whatever the values are."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxinfer.quant.array import CodedScale, QuantArray
from jaxinfer.quant.quantize import dequantized, quantize, quantized_shape, unpack_nibbles
from jaxinfer.quant.storage import FORMATS, Storage, fitting

TINY = float(np.finfo(np.float32).tiny)
STORAGES = [
    Storage("int8"),
    Storage("int8", 8),
    Storage("fp8"),
    Storage("int4"),
    Storage("int4", 8),
    Storage("int4", 8, symmetric=False),
    Storage("nf4", 8),
    Storage("fp4", 8),
]
# Rows of ordinary, tiny and huge values, zeros and constants, some of one sign only.
MAGNITUDES = st.sampled_from([0.0, 1e-45, 1e-38, 1e-30, 0.02, 1.0, 3e4, 1e30, 1e38])
ROWS = hnp.arrays(np.float32, (3, 16), elements=st.floats(-1, 1, width=32))


def half_gaps(array: QuantArray, values: np.ndarray) -> np.ndarray:
    """Half the distance between what can be stored around each value, for each group's scale."""
    groups = values.reshape(-1, array.group)
    scale = np.asarray(array.scale, np.float64).reshape(-1, 1)
    if array.codebook is not None:
        table = np.sort(np.asarray(array.codebook, np.float64))
        gaps = np.diff(table)
        place = np.clip(np.searchsorted(table, groups / np.maximum(scale, TINY)) - 1, 0, len(gaps) - 1)
        return (gaps[place] * scale / 2).reshape(values.shape)
    if array.codes.dtype == ml_dtypes.float8_e4m3fn:
        exponent = np.floor(np.log2(np.maximum(np.abs(groups) / scale, 2.0**-6)))
        return (2.0 ** (np.minimum(exponent, 8) - 3) * scale / 2).reshape(values.shape)
    return np.broadcast_to(scale / 2, groups.shape).reshape(values.shape)


@settings(max_examples=150, deadline=None)
@given(
    ROWS,
    MAGNITUDES,
    st.sampled_from(["mixed", "zeros", "constant", "one sign", "one value"]),
    st.sampled_from(STORAGES),
)
def test_every_value_is_within_half_a_step(rows: np.ndarray, magnitude: float, kind: str, storage: Storage) -> None:
    if kind == "zeros":
        rows = np.zeros_like(rows)
    elif kind == "constant":
        rows = np.repeat(rows[:, :1], rows.shape[1], axis=1)
    elif kind == "one sign":
        rows = np.abs(rows)
    elif kind == "one value":
        rows = rows * (np.arange(rows.shape[1]) == 5)
    values = (rows * np.float32(magnitude)).astype(np.float32)
    array = quantize(values, 1, storage)
    back = dequantized(array).astype(np.float64)
    assert np.isfinite(back).all()
    assert (back[values == 0] == 0).all()
    error = np.abs(back - values.astype(np.float64))
    # Float32 rounds the quotient, and what lies below its normal numbers may be flushed to 0.
    assert (error <= half_gaps(array, values) * (1 + 1e-5) + 2 * TINY).all()


def test_integers_by_hand() -> None:
    row = np.array([[1.27, -0.635, 0.005, 0.0151]], np.float32)
    array = quantize(row, 1, Storage("int8"))
    np.testing.assert_array_equal(array.codes, [[127, -64, 0, 2]])  # -63.5 and 0.5 go to the even neighbour
    np.testing.assert_allclose(array.scale, [[0.01]], rtol=1e-6)
    four = quantize(np.array([[7.0, -7.0, 2.5, 0.0, 3.5, -1.0, 0.49, 6.51]], np.float32), 1, Storage("int4"))
    np.testing.assert_array_equal(unpack_nibbles(np.asarray(four.codes))[0], [15, 1, 10, 8, 12, 7, 8, 15])
    assert np.float32(four.scale[0, 0]) == 1 and np.float32(four.offset[0, 0]) == -8
    assert four.codes[0, 0] == 15 | 1 << 4  # the even input is in the low nibble


def test_a_zero_point_by_hand() -> None:
    array = quantize(np.array([[-4.0, 11.0, 0.0, 1.4]], np.float32), 1, Storage("int4", symmetric=False))
    assert np.float32(array.scale[0, 0]) == 1 and array.offset[0, 0] == -4
    np.testing.assert_array_equal(unpack_nibbles(np.asarray(array.codes))[0], [0, 15, 4, 5])
    np.testing.assert_array_equal(dequantized(array), [[-4, 11, 0, 1]])


def test_scales_of_int4_are_rounded_up_to_bfloat16() -> None:
    values = np.array([[1.0 + 2**-12, 0.5]], np.float32) * 7
    assert np.float32(quantize(values, 1, Storage("int4")).scale[0, 0]) == 1 + 2**-7


def test_float8_by_hand() -> None:
    array = quantize(np.array([[448.0, 17.0, 18.9, -0.00195312, 0.0]], np.float32), 1, Storage("fp8"))
    np.testing.assert_array_equal(array.codes.astype(np.float32), [[448, 16, 18, -0.001953125, 0]])
    assert array.scale[0, 0] == 1


def test_groups_have_scales_of_their_own() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((2, 3, 4, 8)).astype(np.float32)
    array = quantize(values, 2, Storage("int4", 16))
    assert array.scale.shape == (2, 3, 2) and array.codes.shape == (2, 3, 4, 4) and array.shape == values.shape
    expected = np.abs(values.reshape(2, 3, 2, 16)).max(-1) / 7
    np.testing.assert_allclose(array.scale.astype(np.float32), expected, rtol=2**-7)


def test_gaussian_weights_are_nearer_in_nf4_than_in_int4() -> None:
    values = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    errors = {
        kind: float(((dequantized(quantize(values, 1, Storage(kind, 64))) - values) ** 2).mean())  # type: ignore[arg-type]
        for kind in ("int4", "nf4", "fp4")
    }
    assert errors["nf4"] < 0.9 * errors["int4"] and errors["nf4"] < errors["fp4"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -2e38])
def test_what_has_no_scale_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="NaN or a value beyond 1e"):
        quantize(np.array([[1.0, bad]], np.float32), 1, Storage("int8"))


@pytest.mark.parametrize(("shape", "storage"), [((2, 33), Storage("int4")), ((2, 48), Storage("int4", 32))])
def test_what_does_not_fit_is_refused(shape: tuple[int, ...], storage: Storage) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        quantized_shape(shape, 1, storage)


@pytest.mark.parametrize(
    ("wanted", "row", "last", "found"),
    [
        (Storage("int4", 128), 576, 576, Storage("int4", 64)),  # SmolLM2's width is 4.5 * 128
        (Storage("int4", 128), 256, 256, Storage("int4", 128)),
        (Storage("nf4", 64, double=True), 96, 96, Storage("nf4", 32, double=True)),
        (Storage("int4", 128, symmetric=False), 72, 72, Storage("int8")),
        (Storage("int4"), 33, 33, Storage("int8")),
        (Storage("int4", 32), 96, 3, Storage("int8")),
        (Storage("int4"), 34, 34, Storage("int4")),
        (Storage("int8", act_bits=8), 33, 33, Storage("int8", act_bits=8)),
    ],
)
def test_groups_that_do_not_divide_a_row_shrink(wanted: Storage, row: int, last: int, found: Storage) -> None:
    assert fitting(wanted, row, last) == found


@pytest.mark.parametrize("storage", [*FORMATS.values(), Storage("int4", 64, False), Storage("nf4", 64, double=True)])
def test_bytes_are_those_of_the_formula(storage: Storage) -> None:
    expected = quantized_shape((3, 5, 256), 2, storage)
    array = quantize(np.ones((3, 5, 256), np.float32), 2, storage)
    assert array.nbytes == expected.nbytes == storage.nbytes(15, 256)
    assert isinstance(array.scale, CodedScale) == storage.double


def test_bits_of_a_weight() -> None:
    bits = {name: 8 * storage.nbytes(4096, 4096) / 4096**2 for name, storage in FORMATS.items()}
    assert bits["int8"] == pytest.approx(8 + 32 / 4096) and bits["int4"] == 4 + 32 / 128
    assert bits["nf4"] == pytest.approx(4 + 32 / 64, abs=1e-3)
    double = 8 * Storage("nf4", 64, double=True).nbytes(4096, 4096) / 4096**2
    assert double == pytest.approx(4 + 8 / 64 + 32 / 64 / 256, abs=1e-3)  # arXiv:2305.14314: 0.127 bits
