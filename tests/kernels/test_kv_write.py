"""The KV write: where each key and value lands, as what, and that the pool is written in place."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.kv_write import kv_write, triton
from pallas_kernels.kv_write.config import Tiles, tiles_for

LIMITS = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344, "uint8": 7}
"""Of each quantised pool's codes; uint8 is int4."""


@pytest.fixture(params=["xla", "triton-interpret"])
def write(request: pytest.FixtureRequest) -> Any:
    """`kv_write` of each implementation, jitted."""
    return jax.jit(partial(kv_write, implementation=request.param))


def pool(dtype: str, pages: int, heads: int, page_size: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """A quantised pool whose codes and scales tell where nothing was written."""
    width = head_dim // 2 if dtype == "uint8" else head_dim
    codes = np.full((pages, 2 * heads, page_size, width), 1, np.uint8).view(jnp.dtype(dtype))
    return codes, np.full((pages, 2 * heads, page_size), 7.0, np.float32)


def decoded(codes: Any) -> np.ndarray:
    """float64 of codes; of uint8 the two nibbles in turn, low one first."""
    codes = np.asarray(codes)
    if codes.dtype != np.uint8:
        return codes.astype(np.float64)
    nibbles = np.stack([codes % 16, codes // 16], axis=-1).astype(np.int64)
    return np.where(nibbles > 7, nibbles - 16, nibbles).reshape(*codes.shape[:-1], -1).astype(np.float64)


def all_codes(dtype: str) -> np.ndarray:
    """Every value that a code can stand for."""
    if dtype.startswith("float8"):
        values = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, dtype)).astype(np.float64)
        return np.unique(values[np.abs(values) <= LIMITS[dtype]])
    return np.arange(-LIMITS[dtype], LIMITS[dtype] + 1, dtype=np.float64)


@pytest.mark.parametrize("head_dim", [4, 6])
def test_keys_and_values_land_in_their_rows(write: Any, head_dim: int) -> None:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 3, 2, head_dim)).astype(np.float32)
    page_ids, offsets = np.array([2, 2, 4]), np.array([0, 3, 1])
    pages = np.asarray(write(k, v, jnp.zeros((5, 4, 4, head_dim)), page_ids, offsets))
    for token in range(3):
        for head in range(2):
            np.testing.assert_array_equal(pages[page_ids[token], 2 * head, offsets[token]], k[token, head])
            np.testing.assert_array_equal(pages[page_ids[token], 2 * head + 1, offsets[token]], v[token, head])
    assert np.count_nonzero(pages) == k.size + v.size


def test_programs_of_several_heads_write_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = np.random.default_rng(1).standard_normal((2, 2, 4, 8)).astype(np.float32)
    codes, scales = pool("int8", 3, 4, 2, 8)
    places = np.array([1, 2]), np.array([1, 0])
    expected = jax.jit(partial(kv_write, implementation="reference"))(k, v, codes, *places, scales=scales)
    monkeypatch.setattr(triton, "tiles_for", lambda *_: Tiles(heads=2, num_warps=1))
    got = jax.jit(partial(kv_write, implementation="triton-interpret"))(k, v, codes, *places, scales=scales)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(
    ("tokens", "heads", "rows", "head_dim"),
    [(1, 8, 6, 128), (32, 8, 6, 128), (512, 32, 3, 128), (9000, 3, 5, 64), (512, 1, 73, 64)],
)
def test_tiles_divide_the_heads_and_fill_the_gpu(tokens: int, heads: int, rows: int, head_dim: int) -> None:
    tiles = tiles_for(tokens, heads, rows, head_dim)
    assert heads % tiles.heads == 0
    assert tiles.heads == 1 or tokens * heads // tiles.heads >= 512
    assert tiles.num_warps in (1, 2, 4, 8)
    assert tiles.heads * rows * head_dim <= 2048 or tiles.heads == 1


def test_the_pool_keeps_its_dtype(write: Any) -> None:
    k = np.ones((1, 1, 2), np.float32)
    assert write(k, k, jnp.zeros((2, 2, 2, 2), jnp.bfloat16), np.array([1]), np.array([0])).dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", LIMITS)
def test_codes_are_the_nearest_to_the_scaled_value(write: Any, dtype: str) -> None:
    """Rows of magnitudes from 1e-30 to 1e30; one of zeros, and one too small for a scale of its own."""
    rng = np.random.default_rng(2)
    kv = rng.standard_normal((2, 8, 2, 16)) * 10.0 ** rng.integers(-30, 30, (2, 8, 2, 1))
    kv[0, 0, 0], kv[1, 1, 1] = 0, 1e-42
    k, v = kv.astype(np.float32)
    codes, scales = pool(dtype, 3, 2, 4, 16)
    places = np.repeat([1, 2], 4), np.tile(np.arange(4), 2)
    got_codes, got_scales = write(k, v, codes, *places, scales=scales)
    assert (got_codes.dtype, got_scales.dtype) == (codes.dtype, np.float32)
    for row, rows in enumerate([k[:, 0], v[:, 0], k[:, 1], v[:, 1]]):
        got, scale = decoded(got_codes)[places[0], row, places[1]], np.asarray(got_scales)[places[0], row, places[1]]
        peak = np.abs(rows).max(-1).astype(np.float64)
        np.testing.assert_allclose(scale, np.where(peak < 1e-36, 1, peak / LIMITS[dtype]), rtol=1e-6)
        np.testing.assert_array_equal(np.abs(got).max(-1), np.where(peak < 1e-36, 0, LIMITS[dtype]))
        error = np.abs(got - rows / scale[:, None].astype(np.float64))
        best = np.abs(all_codes(dtype)[:, None, None] - rows / scale[:, None].astype(np.float64)).min(0)
        np.testing.assert_array_less(error, best + 1e-5 * np.abs(got) + 1e-9)
    np.testing.assert_array_equal(decoded(got_codes)[0], decoded(codes)[0])
    np.testing.assert_array_equal(np.asarray(got_scales)[0], 7.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e5])
@pytest.mark.parametrize("part", [0, 1])
def test_what_is_not_finite_is_a_nan_key_without_a_value(write: Any, bad: float, part: int) -> None:
    """Of its head and token only; 1e5 is beyond float16."""
    kv = np.ones((2, 2, 2, 4), np.float32)
    kv[part, 1, 0, 2] = bad
    pages = np.asarray(write(*kv, jnp.zeros((2, 4, 2, 4), jnp.float16), np.array([1, 1]), np.array([0, 1])))
    np.testing.assert_array_equal(pages[1, :, 0], np.ones((4, 4)))
    np.testing.assert_array_equal(pages[1, :, 1], np.array([[np.nan], [0], [1], [1]]) * np.ones(4))


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("part", [0, 1])
def test_in_a_quantised_pool_the_keys_scale_is_nan(write: Any, dtype: str, part: int) -> None:
    kv = np.ones((2, 2, 2, 4), np.float32)
    kv[part, 1, 0, 2] = -np.inf if part else np.nan
    codes, scales = pool(dtype, 2, 2, 2, 4)
    got_codes, got_scales = write(*kv, codes, np.array([1, 1]), np.array([0, 1]), scales=scales)
    one = 1 / np.float32(LIMITS[dtype])
    np.testing.assert_array_equal(got_scales[1], np.array([[one, np.nan], [one, 1], [one, one], [one, one]]))
    full = np.full(4, LIMITS[dtype])
    np.testing.assert_array_equal(decoded(got_codes)[1, :, 0], [full] * 4)
    np.testing.assert_array_equal(decoded(got_codes)[1, :, 1], [0 * full, 0 * full, full, full])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_padding_tokens_share_page_0(write: Any, dtype: str) -> None:
    k, v = np.random.default_rng(3).standard_normal((2, 4, 2, 8)).astype(np.float32)
    codes, scales = pool("int8", 3, 2, 2, 8) if dtype == "int8" else (np.ones((3, 4, 2, 8), np.float32), None)
    got = write(k, v, codes, np.array([0, 2, 0, 0]), np.array([0, 1, 0, 0]), scales=scales)
    pages = decoded(got[0] if scales is not None else got)
    assert np.isfinite(pages).all()
    untouched = np.ones(pages.shape, bool)
    untouched[0, :, 0] = untouched[2, :, 1] = False
    np.testing.assert_array_equal(pages[untouched], decoded(codes)[untouched])
    np.testing.assert_array_equal(pages[2, :, 1] != decoded(codes)[2, :, 1], np.ones((4, 8), bool))


def test_a_step_without_tokens_writes_nothing(write: Any) -> None:
    k, none = np.zeros((0, 2, 8), np.float32), np.zeros(0, np.int32)
    codes, scales = pool("int8", 3, 2, 2, 8)
    got_codes, got_scales = write(k, k, codes, none, none, scales=scales)
    np.testing.assert_array_equal(got_codes, codes)
    np.testing.assert_array_equal(got_scales, scales)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_donated_pool_is_written_in_place(dtype: str) -> None:
    codes, scales = pool("int8", 64, 2, 16, 8) if dtype == "int8" else (np.zeros((64, 4, 16, 8), np.float32), None)
    k = jnp.ones((2, 2, 8))
    index = jnp.array([1, 2])
    write = jax.jit(lambda pages, scales: kv_write(k, k, pages, index, index, scales=scales), donate_argnums=(0, 1))
    memory = write.lower(codes, scales).compile().memory_analysis()
    assert memory.alias_size_in_bytes == codes.nbytes + (0 if scales is None else scales.nbytes)
    assert memory.temp_size_in_bytes < codes.nbytes / 10


def test_bad_arguments_are_refused_by_name() -> None:
    k, pages, index = np.ones((2, 2, 4), np.float32), np.zeros((3, 4, 4, 4), np.float32), np.zeros(2, int)
    scales = np.zeros((3, 4, 4), np.float32)
    with pytest.raises(ValueError, match=r"v float32\(1, 2, 4\)"):
        kv_write(k, k[:1], pages, index, index)
    with pytest.raises(ValueError, match=r"k float32\(2, 2, 4\) and v int64\(2, 2, 4\) must both be"):
        kv_write(k, k.astype(int), pages, index, index)
    with pytest.raises(ValueError, match=r"k is float8_e5m2\(2, 2, 4\); it must be"):
        kv_write(k.astype(ml_dtypes.float8_e5m2), k, pages, index, index)
    with pytest.raises(ValueError, match=r"offsets is float32; it must be int32: use"):
        kv_write(k, k, pages, index, index.astype(np.float32))
    with pytest.raises(ValueError, match=r"pages float32\(3, 2, 4, 4\) must be \[P, 2K, S, H\] with K=2 and H=4"):
        kv_write(k, k, pages[:, :2], index, index)
    with pytest.raises(ValueError, match="page_ids"):
        kv_write(k, k, pages, index[:1], index)
    with pytest.raises(ValueError, match=r"k is int64\(2, 2, 4\)"):
        kv_write(k.astype(int), k, pages, index, index)
    with pytest.raises(ValueError, match=r"scales\(3, 4, 4\) were given for pages of float32"):
        kv_write(k, k, pages, index, index, scales=scales)
    with pytest.raises(ValueError, match=r"scales=None must be float32\(3, 4, 4\)"):
        kv_write(k, k, pages.astype(np.int8), index, index)
    with pytest.raises(ValueError, match=r"implementation='cuda' of kv_write"):
        kv_write(k, k, pages, index, index, implementation="cuda")


def test_pools_that_the_kernel_cannot_write_are_not_attempted() -> None:
    index = jax.ShapeDtypeStruct((2,), jnp.int32)
    run = partial(jax.eval_shape, partial(kv_write, implementation="triton"))
    k = jax.ShapeDtypeStruct((2, 2, 63), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((1 << 20, 4, 16, 63), jnp.int8)  # almost 4 GiB of bytes: no pairs of channels
    with pytest.raises(NotImplementedError, match="between 2 and 4 GiB.*2 channels at a time"):
        run(k, k, pages, index, index, scales=jax.ShapeDtypeStruct(pages.shape[:3], jnp.float32))


@pytest.mark.parametrize("dtype", LIMITS)
def test_bytes_in_pairs(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of 2 to 4 GiB are written as int16; here every pool."""
    k, v = np.random.default_rng(4).standard_normal((2, 6, 2, 24)).astype(np.float32)
    codes, scales = pool(dtype, 4, 2, 4, 24)
    places = np.array([1, 1, 3, 2, 0, 0]), np.array([0, 3, 2, 1, 0, 0])
    expected = jax.jit(partial(kv_write, implementation="triton-interpret"))(k, v, codes, *places, scales=scales)
    monkeypatch.setattr("pallas_kernels.byte_pairs.SIGNED_LIMIT", 0)
    got = jax.jit(partial(kv_write, implementation="triton-interpret"))(k, v, codes, *places, scales=scales)
    assert got[0].dtype == codes.dtype and got[0].shape == codes.shape
    jax.tree.map(np.testing.assert_array_equal, got, expected)
