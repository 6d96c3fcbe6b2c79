"""The page formats against numpy and ml_dtypes: scales, rounding, saturation, nibbles, what is not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.kv_format import (
    FORMATS,
    INT4,
    INT8,
    KVFormat,
    dequantize,
    format_of,
    head_dim_of,
    mark_nonfinite,
    pack_nibbles,
    quantize,
    unpack_nibbles,
)

EACH_FORMAT = pytest.mark.parametrize("kv_format", FORMATS, ids=[f.name for f in FORMATS])


def rows_of(kv_format: KVFormat, dtype: Any = np.float32) -> np.ndarray:
    """Rows of very different size, one of zeros."""
    rows = np.random.default_rng(0).standard_normal((7, 3, 16))
    rows *= 10.0 ** np.arange(-3, 4)[:, None, None]
    rows[2, 1] = 0.0
    return rows.astype(dtype)


def by_hand(rows: np.ndarray, kv_format: KVFormat) -> tuple[np.ndarray, np.ndarray]:
    """Codes as float32 and scales, in numpy."""
    amax = np.abs(rows.astype(np.float32)).max(-1)
    scales = np.where(amax == 0, np.float32(1), amax / np.float32(kv_format.limit))
    codes = rows.astype(np.float32) / scales[..., None]
    if kv_format.name.startswith("fp8"):
        kinds = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
        return np.clip(codes, -kv_format.limit, kv_format.limit).astype(kinds[kv_format.name]).astype(
            np.float32
        ), scales
    return np.rint(codes), scales


def codes_of(codes: jax.Array, kv_format: KVFormat) -> np.ndarray:
    """What is stored, as float32[..., H]."""
    stored = np.asarray(codes)
    if kv_format is not INT4:
        return stored.astype(np.float32)
    signed = np.stack([stored & 15, stored >> 4], -1).reshape(*stored.shape[:-1], -1).astype(np.float32)
    return np.where(signed > 7, signed - 16, signed)


@EACH_FORMAT
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_codes_and_scales(kv_format: KVFormat, dtype: Any, compiled: bool) -> None:
    rows = rows_of(kv_format, dtype)
    run = jax.jit(quantize, static_argnums=1) if compiled else quantize
    codes, scales = run(jnp.asarray(rows), kv_format)
    expected_codes, expected_scales = by_hand(rows, kv_format)
    assert codes.dtype == kv_format.dtype and scales.dtype == jnp.float32
    assert codes.shape == (7, 3, 8 if kv_format is INT4 else 16)
    np.testing.assert_allclose(scales, expected_scales, rtol=2e-7)
    # A compiler may divide by multiplying with the reciprocal: a code on the edge between two may fall to either.
    close = codes_of(codes, kv_format) == expected_codes
    assert close.mean() > 0.99
    step = {"int8": 1, "int4": 1, "fp8_e4m3": 32, "fp8_e5m2": 8192}[kv_format.name]
    np.testing.assert_allclose(codes_of(codes, kv_format), expected_codes, atol=step, rtol=0)


@EACH_FORMAT
def test_ties_go_to_even_codes(kv_format: KVFormat) -> None:
    ties, expected = {
        "int8": ([0.5, 1.5, -2.5, 126.5], [0, 2, -2, 126]),
        "int4": ([0.5, 1.5, -2.5, 6.5], [0, 2, -2, 6]),
        "fp8_e4m3": ([17, 19, -21, 432], [16, 20, -20, 448]),
        "fp8_e5m2": ([9, 11, -13, 45056], [8, 12, -12, 49152]),
    }[kv_format.name]
    codes, scales = quantize(jnp.asarray([*ties, kv_format.limit, 0.0]), kv_format)
    assert scales == 1.0
    np.testing.assert_array_equal(codes_of(codes, kv_format), [*expected, kv_format.limit, 0.0])


@EACH_FORMAT
def test_every_code_survives_the_round_trip(kv_format: KVFormat) -> None:
    """A row that holds the limit has the scale 1, and then codes are kept as they are."""
    every = np.arange(256, dtype=np.uint8)
    if kv_format.name.startswith("fp8"):
        values = every.view(kv_format.dtype).astype(np.float32)
        values = values[np.isfinite(values)]
    else:
        values = np.arange(-kv_format.limit, kv_format.limit + 1, dtype=np.float32)
    rows = np.stack([values, np.full_like(values, kv_format.limit)], axis=-1)
    codes, scales = quantize(jnp.asarray(rows), kv_format)
    np.testing.assert_array_equal(scales, 1.0)
    np.testing.assert_array_equal(dequantize(codes, scales), rows)


@EACH_FORMAT
def test_the_error_is_half_a_step(kv_format: KVFormat) -> None:
    rows = rows_of(kv_format)
    back = np.asarray(dequantize(*quantize(jnp.asarray(rows), kv_format)))
    scales = by_hand(rows, kv_format)[1][..., None]
    if kv_format.name.startswith("fp8"):
        info = ml_dtypes.finfo(kv_format.dtype)
        bound = np.maximum(np.abs(rows) * float(info.eps) / 2, scales * float(info.smallest_subnormal) / 2)
    else:
        bound = scales / 2
    assert (np.abs(back - rows) <= bound * 1.0001).all()


@EACH_FORMAT
@pytest.mark.parametrize("size", [1e-38, 1e-42, 3e38])
def test_rows_of_extreme_size_stay_finite(kv_format: KVFormat, size: float) -> None:
    rows = np.array([[size, -size, 0.0, size / 2]], np.float32)
    codes, scales = quantize(jnp.asarray(rows), kv_format)
    back = np.asarray(dequantize(codes, scales))
    assert np.isfinite(scales).all() and (np.asarray(scales) > 0).all()
    np.testing.assert_allclose(back, rows, rtol=0.3, atol=6e-34)


@EACH_FORMAT
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_the_scale_nan(kv_format: KVFormat, bad: float) -> None:
    rows = rows_of(kv_format)
    clean_codes, clean_scales = quantize(jnp.asarray(rows), kv_format)
    rows[4, 2, 5] = bad
    codes, scales = (np.asarray(part) for part in quantize(jnp.asarray(rows), kv_format))
    assert np.isnan(scales[4, 2]) and not codes[4, 2].astype(np.float32).any()
    others = np.arange(21) != 4 * 3 + 2
    np.testing.assert_array_equal(scales.reshape(-1)[others], np.asarray(clean_scales).reshape(-1)[others])
    flat = np.asarray(clean_codes).reshape(21, -1).view(np.uint8)
    np.testing.assert_array_equal(codes.reshape(21, -1).view(np.uint8)[others], flat[others])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_no_value_that_is_not_finite_is_lost_among_many_rows(bad: float) -> None:
    rows = np.random.default_rng(0).standard_normal((33, 4, 64)).astype(np.float32)  # enough for vector instructions
    rows[5, 1, 7], rows[32, 0, :] = bad, bad
    scales = np.asarray(jax.jit(lambda x: quantize(x, INT8))(rows)[1])
    assert np.argwhere(np.isnan(scales)).tolist() == [[5, 1], [32, 0]]


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_either_half_spoils_the_key_and_clears_the_value(bad: float, part: int) -> None:
    kv = np.ones((2, 3, 2, 4), np.float32)
    kv[part, 1, 0, 2] = bad
    k, v = (np.array(half) for half in mark_nonfinite(*jnp.asarray(kv)))
    assert np.isnan(k[1, 0]).all() and not v[1, 0].any()
    k[1, 0], v[1, 0] = 1.0, 1.0
    np.testing.assert_array_equal([k, v], np.ones_like(kv))


def test_nibbles_are_low_first_and_signed() -> None:
    packed = pack_nibbles(jnp.array([[-7, 7, 1, -1]], jnp.int8))
    np.testing.assert_array_equal(packed, np.array([[0x79, 0xF1]], np.uint8))
    every = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(pack_nibbles(unpack_nibbles(jnp.asarray(every))), every)


def test_the_format_follows_from_the_dtype() -> None:
    assert [format_of(f.dtype) for f in FORMATS] == list(FORMATS)
    assert [format_of(d) for d in (jnp.float32, jnp.bfloat16, np.float16)] == [None] * 3
    assert head_dim_of(jnp.zeros((2, 2, 4, 8), jnp.uint8)) == 16
    assert head_dim_of(jnp.zeros((2, 2, 4, 8), jnp.int8)) == 8


def test_what_cannot_be_stored_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="pages dtype int16 is no page format; use one of float32"):
        format_of(np.int16)
    with pytest.raises(ValueError, match="head_dim=5 must be even for int4"):
        quantize(jnp.zeros((2, 5)), INT4)
