"""The KV pool on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache.paged import (
    KVCache,
    LayerCache,
    copy_blocks,
    init_kv_cache,
    kv_cache_bytes,
    kv_cache_shapes,
    read_features,
    write_features,
)
from jaxinfer.config import KV_CACHE_DTYPES, FeatureSpec
from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.memory import kv_block_bytes

CONFIG = ModelConfig(vocab_size=16, hidden_size=64, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4)
NUM_BLOCKS, BLOCK_SIZE = 6, 8


def test_a_pool_that_does_not_fit_says_what_to_lower() -> None:
    # 2 layers x 1e11 blocks x 8 rows x 16 tokens x 16 numbers x 4 bytes
    with pytest.raises(ValueError, match=r"100000000000 blocks, 1525878.9 GiB, does not fit.*num_gpu_blocks_override"):
        init_kv_cache(CONFIG, 10**11, 16, "float32")


@pytest.mark.parametrize(
    ("dtype", "stored", "width"),
    [
        ("float32", "float32", 16),
        ("bfloat16", "bfloat16", 16),
        ("float16", "float16", 16),
        ("int8", "int8", 16),
        ("fp8_e4m3", "float8_e4m3fn", 16),
        ("fp8_e5m2", "float8_e5m2", 16),
        ("int4", "uint8", 8),
    ],
)
def test_what_a_pool_is_made_of(dtype: str, stored: str, width: int) -> None:
    pool = init_kv_cache(CONFIG, NUM_BLOCKS, BLOCK_SIZE, dtype)
    assert len(pool.layers) == 2 and pool.features is None
    for layer in pool.layers:
        assert layer.pages.shape == (NUM_BLOCKS, 8, BLOCK_SIZE, width) and layer.pages.dtype == stored
        assert not np.asarray(layer.pages.astype(jnp.float32)).any()
        if dtype in ("float32", "bfloat16", "float16"):
            assert layer.scales is None
        else:
            assert layer.scales is not None and layer.scales.shape == (NUM_BLOCKS, 8, BLOCK_SIZE)
            assert layer.scales.dtype == jnp.float32 and not np.asarray(layer.scales).any()


@pytest.mark.parametrize(
    "features", [None, FeatureSpec("hidden", 64, "float32"), FeatureSpec("hidden", 64, "bfloat16")]
)
@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_a_pool_takes_what_the_planner_says(dtype: str, features: FeatureSpec | None) -> None:
    pool = init_kv_cache(CONFIG, NUM_BLOCKS, BLOCK_SIZE, dtype, features)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(pool))
    assert held == NUM_BLOCKS * kv_block_bytes(CONFIG, BLOCK_SIZE, dtype, features) == kv_cache_bytes(pool)
    shapes = kv_cache_shapes(CONFIG, NUM_BLOCKS, BLOCK_SIZE, dtype, features)
    assert kv_cache_bytes(shapes) == held
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), pool
    )


@pytest.mark.parametrize("dtype", ["float32", "int8", "fp8_e4m3", "int4"])
def test_a_copied_block_is_the_same_with_its_scales(dtype: str) -> None:
    rng = np.random.default_rng(0)
    empty = init_kv_cache(CONFIG, NUM_BLOCKS, BLOCK_SIZE, dtype, FeatureSpec("hidden", 64, "float16"))
    layers = tuple(
        LayerCache(
            jnp.asarray(rng.integers(0, 8, layer.pages.shape), layer.pages.dtype),
            None if layer.scales is None else jnp.asarray(rng.random(layer.scales.shape), jnp.float32),
        )
        for layer in empty.layers
    )
    pool = KVCache(layers, jnp.asarray(rng.random(empty.features.shape), jnp.float16))
    before = [np.asarray(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(pool)]
    copied = jax.jit(copy_blocks, donate_argnums=0)(pool, jnp.array([1, 4, 0]), jnp.array([3, 5, 0]))
    assert jax.tree.structure(copied) == jax.tree.structure(pool)
    for old, leaf in zip(before, jax.tree.leaves(copied), strict=True):
        assert (np.asarray(leaf.astype(jnp.float32)) == old[[0, 1, 2, 1, 4, 4]]).all()


def test_features_of_tokens_lie_in_their_slots() -> None:
    pool = init_kv_cache(CONFIG, NUM_BLOCKS, BLOCK_SIZE, "int8", FeatureSpec("hidden", 64, "float32"))
    values = jnp.asarray(np.random.default_rng(1).random((3, 64)), jnp.float32)
    pages, offsets = jnp.array([4, 2, 4]), jnp.array([7, 0, 1])
    written = write_features(pool, pages, offsets, values)
    np.testing.assert_array_equal(written.features[jnp.array([4, 2, 4]), 0, offsets], values)
    assert int((np.asarray(written.features) != 0).any(-1).sum()) == 3
    np.testing.assert_array_equal(read_features(written, pages[1:], offsets[1:]), values[1:])


def test_without_features_a_pool_is_its_layers() -> None:
    pool = init_kv_cache(CONFIG, NUM_BLOCKS, BLOCK_SIZE, "int8")
    assert write_features(pool, jnp.array([1]), jnp.array([0]), jnp.ones((1, 64))) is pool
    assert len(jax.tree.leaves(pool)) == 4
