"""Copies of blocks: calls one after the other do what the copies do one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.cache.paged import copy_blocks, init_kv_cache
from jaxinfer.models.config import ModelConfig
from jaxinfer.runner.block_copies import COPIES_A_CALL, copy_calls

pairs = st.tuples(st.integers(1, 9), st.integers(1, 9)).filter(lambda pair: pair[0] != pair[1])


@given(copies=st.lists(pairs, max_size=30))
def test_any_copies(copies: list[tuple[int, int]]) -> None:
    expected, pool = list(range(10)), np.arange(10)
    for source, target in copies:
        expected[target] = expected[source]
    for sources, targets in copy_calls(copies):
        assert sources.shape == targets.shape == (COPIES_A_CALL,) and sources.dtype == targets.dtype == np.int32
        real = sources > 0
        assert (targets[~real] == 0).all() and len(set(targets[real])) == real.sum()
        assert not set(sources[real]) & set(targets[real])
        pool[targets] = pool[sources]
    assert pool.tolist() == expected


def test_as_few_calls_as_can_be() -> None:
    assert list(copy_calls([])) == []
    calls = list(copy_calls([(1, 2 + place) for place in range(63)]))
    assert len(calls) == -(-63 // COPIES_A_CALL)


def test_a_pool_of_codes_is_copied_with_its_scales() -> None:
    model = ModelConfig(8, 16, 16, 2, 2, 1)
    kv = init_kv_cache(model, 6, 4, "int8")
    leaves, tree = jax.tree.flatten(kv)
    filled = [jnp.arange(leaf.size).reshape(leaf.shape).astype(leaf.dtype) for leaf in leaves]
    ((sources, targets),) = copy_calls([(2, 5), (2, 3)])
    copied = jax.tree.leaves(copy_blocks(jax.tree.unflatten(tree, filled), jnp.array(sources), jnp.array(targets)))
    for before, after in zip(filled, copied, strict=True):
        np.testing.assert_array_equal(after, before[jnp.array([0, 1, 2, 2, 4, 2])])
