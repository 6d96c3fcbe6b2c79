"""The KV write: where each key and value lands, and that the pool is written in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import kv_write


def test_keys_and_values_land_in_their_rows() -> None:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 3, 2, 4)).astype(np.float32)
    page_ids, offsets = np.array([2, 2, 4]), np.array([0, 3, 1])
    pages = np.asarray(kv_write(k, v, jnp.zeros((5, 4, 4, 4)), page_ids, offsets))
    for token in range(3):
        for head in range(2):
            np.testing.assert_array_equal(pages[page_ids[token], 2 * head, offsets[token]], k[token, head])
            np.testing.assert_array_equal(pages[page_ids[token], 2 * head + 1, offsets[token]], v[token, head])
    assert np.count_nonzero(pages) == k.size + v.size


def test_the_pool_keeps_its_dtype() -> None:
    k = np.ones((1, 1, 2), np.float32)
    assert kv_write(k, k, jnp.zeros((2, 2, 2, 2), jnp.bfloat16), np.array([1]), np.array([0])).dtype == jnp.bfloat16


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e5])
@pytest.mark.parametrize("part", [0, 1])
def test_what_is_not_finite_is_a_nan_key_without_a_value(bad: float, part: int) -> None:
    """Of its head and token only; 1e5 is beyond float16."""
    kv = np.ones((2, 2, 2, 4), np.float32)
    kv[part, 1, 0, 2] = bad
    pool = jnp.zeros((2, 4, 2, 4), jnp.float16)
    pages = np.asarray(kv_write(*jnp.asarray(kv), pool, np.array([1, 1]), np.array([0, 1])))
    np.testing.assert_array_equal(pages[1, :, 0], np.ones((4, 4)))
    np.testing.assert_array_equal(pages[1, :, 1], np.array([[np.nan], [0], [1], [1]]) * np.ones(4))


def test_a_donated_pool_is_written_in_place() -> None:
    pool = jnp.zeros((64, 4, 16, 8))
    k = jnp.ones((2, 2, 8))
    index = jnp.array([1, 2])
    compiled = jax.jit(kv_write, donate_argnums=2).lower(k, k, pool, index, index).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes / 10


def test_bad_shapes_are_refused_by_name() -> None:
    k, pages, index = np.ones((2, 2, 4)), np.zeros((3, 4, 4, 4)), np.zeros(2, int)
    with pytest.raises(ValueError, match=r"2K, S, H"):
        kv_write(k, k[:1], pages, index, index)
    with pytest.raises(ValueError, match="page_ids"):
        kv_write(k, k, pages, index[:1], index)
