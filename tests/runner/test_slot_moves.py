"""Moves of slots: what tokens of a tree have in the pool goes to its place, in every array of the pool."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.cache.paged import init_kv_cache, move_slots
from jaxinfer.config import FeatureSpec
from jaxinfer.models.config import ModelConfig
from jaxinfer.runner.slot_moves import MOVES_A_CALL, move_calls


def misplaced(paths: list[list[int]]) -> list[tuple[int, int]]:
    """The moves of requests whose drafts begin at slots 100, 200, ..., by the paths that hold of them."""
    return [
        (100 * number + index, 100 * number + target)
        for number, path in enumerate(paths, start=1)
        for target, index in enumerate(path)
        if index != target
    ]


@given(paths=st.lists(st.sets(st.integers(0, 60), max_size=20).map(sorted), max_size=8))
def test_calls_one_after_the_other_do_what_all_at_once_would(paths: list[list[int]]) -> None:
    moves = misplaced(paths)
    pool = np.arange(1000)
    expected = pool.copy()
    for source, target in moves:
        expected[target] = source
    calls = list(move_calls(moves))
    assert len(calls) == -(-len(moves) // MOVES_A_CALL)
    for sources, targets in calls:
        assert sources.shape == (MOVES_A_CALL,) and sources.dtype == np.int32
        pool[targets] = pool[sources]
    assert pool.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8_e4m3", "int4"])
def test_everything_that_the_pool_holds_of_a_token(dtype: str) -> None:
    """Pages, scales and features; a source that is a target as well is read first."""
    model = ModelConfig(8, 16, 16, 2, 2, 1)
    kv = init_kv_cache(model, 6, 4, dtype, FeatureSpec("hidden", 16, "float32"))
    leaves, tree = jax.tree.flatten(kv)
    assert len(leaves) == 2 * (2 if dtype in ("int8", "fp8_e4m3", "int4") else 1) + 1
    rng = np.random.default_rng(0)
    filled = [jnp.asarray(rng.integers(0, 100, leaf.shape)).astype(leaf.dtype) for leaf in leaves]
    ((sources, targets),) = move_calls([(2 * 4 + 3, 2 * 4 + 1), (5 * 4, 2 * 4 + 3), (3 * 4 + 2, 3 * 4)])
    slots = jnp.stack([sources, targets])
    moved = jax.tree.leaves(
        jax.jit(move_slots, donate_argnums=0)(jax.tree.unflatten(tree, list(map(jnp.copy, filled))), slots)
    )
    for before, after in zip(filled, moved, strict=True):
        expected = np.array(before)
        expected[2, :, 1], expected[2, :, 3], expected[3, :, 0] = before[2, :, 3], before[5, :, 0], before[3, :, 2]
        np.testing.assert_array_equal(np.asarray(after), expected)
