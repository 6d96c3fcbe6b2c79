"""The page copy: exact, with scales, in place, and padding that does nothing."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import self_check
from pallas_kernels.block_copy import api, block_copy, triton

DTYPES = ("float32", "bfloat16", "int8", "uint8", "float8_e4m3fn", "float8_e5m2")


@pytest.fixture(params=["xla", "triton-interpret"])
def copy(request: pytest.FixtureRequest) -> Any:
    """`block_copy` of each implementation, jitted."""
    return jax.jit(partial(block_copy, implementation=request.param))


def random_pages(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Any bits at all, NaN among them."""
    itemsize = jnp.dtype(dtype).itemsize
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * itemsize), np.uint8).view(jnp.dtype(dtype))


def exact(array: Any) -> np.ndarray:
    """float64, where NaN equals NaN: XLA's CPU changes the bits of a NaN of less than 32 bits."""
    return np.asarray(array).astype(np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_are_copied_exactly(copy: Any, dtype: str) -> None:
    pages = random_pages(dtype, (6, 2, 3, 5))
    scales = None if dtype in ("float32", "bfloat16") else np.arange(36, dtype=np.float32).reshape(6, 2, 3)
    got = copy(jnp.asarray(pages), np.array([4, 0, 2, 0]), np.array([1, 0, 5, 0]), scales=scales)
    got_pages, *got_scales = got if scales is not None else (got,)
    expected = [0, 4, 2, 3, 4, 2]
    assert got_pages.dtype == pages.dtype
    np.testing.assert_array_equal(exact(got_pages), exact(pages[expected]))
    if scales is not None:
        np.testing.assert_array_equal(got_scales[0], scales[expected])


def test_long_pages_are_copied_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """In three stretches, the last one short; the scales in three shares."""
    monkeypatch.setattr(triton, "STRETCH_BYTES", 64)
    pages, scales = random_pages("float32", (3, 2, 2, 10)), np.arange(12, dtype=np.float32).reshape(3, 4)
    run = jax.jit(partial(block_copy, implementation="triton-interpret"))
    got_pages, got_scales = run(pages, np.array([2]), np.array([1]), scales=scales)
    np.testing.assert_array_equal(exact(got_pages), exact(pages[[0, 2, 2]]))
    np.testing.assert_array_equal(got_scales, scales[[0, 2, 2]])


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_bytes_in_pairs(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of 2 to 4 GiB are copied as int16; here every pool."""
    monkeypatch.setattr("pallas_kernels.byte_pairs.SIGNED_LIMIT", 0)
    pages, scales = random_pages(dtype, (4, 2, 3, 6)), np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    run = jax.jit(partial(block_copy, implementation="triton-interpret"))
    got_pages, got_scales = run(jnp.asarray(pages), np.array([2, 0]), np.array([1, 0]), scales=scales)
    assert got_pages.dtype == pages.dtype
    np.testing.assert_array_equal(exact(got_pages), exact(pages[[0, 2, 2, 3]]))
    np.testing.assert_array_equal(got_scales, scales[[0, 2, 2, 3]])
    with pytest.raises(NotImplementedError, match="odd number of them in a page"):
        run(jnp.asarray(pages[:, :1, :, :5]), np.array([2]), np.array([1]))


def test_no_pairs_change_nothing(copy: Any) -> None:
    pages = random_pages("int8", (3, 2, 2, 4))
    none = np.zeros(0, np.int32)
    np.testing.assert_array_equal(copy(jnp.asarray(pages), none, none), pages)


def test_a_donated_pool_is_written_in_place() -> None:
    pages, scales = jnp.zeros((64, 4, 16, 8), jnp.int8), jnp.zeros((64, 4, 16))
    ids = jnp.array([1, 2])
    run = jax.jit(lambda pages, scales: block_copy(pages, ids, ids + 2, scales=scales), donate_argnums=(0, 1))
    memory = run.lower(pages, scales).compile().memory_analysis()
    assert memory.alias_size_in_bytes == pages.nbytes + scales.nbytes
    assert memory.temp_size_in_bytes < pages.nbytes / 8


def test_bad_arguments_are_refused_by_name() -> None:
    pages, ids = np.zeros((3, 2, 2, 4)), np.zeros(2, int)
    with pytest.raises(ValueError, match=r"source_ids\(1,\) and target_ids\(2,\)"):
        block_copy(pages, ids[:1], ids)
    with pytest.raises(ValueError, match=r"target_ids is float64; it must be int32"):
        block_copy(pages, ids, ids.astype(float))
    with pytest.raises(ValueError, match=r"pages\(3, 2, 2, 4\) and scales\(2, 2, 2\) must be"):
        block_copy(pages, ids, ids, scales=np.zeros((2, 2, 2)))
    with pytest.raises(ValueError, match=r"implementation='cuda' of block_copy"):
        block_copy(pages, ids, ids, implementation="cuda")


@pytest.mark.parametrize("with_scales", [False, True])
def test_the_self_check_passes_a_right_kernel_and_no_wrong_one(
    with_scales: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ("int8" if with_scales else "bfloat16", with_scales)
    expected = api._check_block_copy("reference", *case)
    assert self_check.difference(api._check_block_copy("triton-interpret", *case), expected) is None
    monkeypatch.setattr(triton.pl, "next_power_of_2", lambda size: 1 << (size.bit_length() - 1))  # too short
    assert self_check.difference(api._check_block_copy("triton-interpret", *case), expected) is not None
