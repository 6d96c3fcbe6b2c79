"""Replicas that share their weights, without devices."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from jaxinfer.startup.replica import Replica, SleepTogether
from jaxinfer.startup.resting_weights import RestingWeights
from jaxinfer.startup.sleep import Sleep


class Runner:
    """Holds weights, like a `ModelRunner`."""

    def __init__(self, params: Any) -> None:
        self.leaves = tuple(jax.tree.leaves(params))

    def placed(self, params: Any) -> Any:
        return params

    def update_params(self, params: Any) -> None:
        self.leaves = tuple(jax.tree.leaves(params))

    def take_params(self) -> Any:
        leaves, self.leaves = self.leaves, ()
        return leaves

    def release_kv(self) -> None: ...

    def restore_kv(self) -> None: ...


def replica(params: Any, source: Runner | None = None, is_dead: bool = False) -> Replica:
    engine: Any = SimpleNamespace(is_dead=is_dead, suspend=list, resume=lambda: None)
    runner: Any = Runner(params)
    tree = jax.tree.structure(params)
    read = None if source is None else lambda: jax.tree.unflatten(tree, source.leaves)
    return Replica(engine, runner, Sleep(engine, runner, RestingWeights(runner, tree, None, read)), None)


def test_those_that_wake_after_the_first_one_died_have_the_latest_weights() -> None:
    old, new = ({"kernel": jax.numpy.full(3, value)} for value in (1.0, 2.0))
    first = replica(old, is_dead=True)
    second = replica(old, first.runner)  # type: ignore[arg-type]
    together = SleepTogether([first, second])
    together.update_params(new)
    together.sleep(1)
    assert together.is_sleeping and not second.runner.leaves
    together.wake_up(None)
    np.testing.assert_array_equal(second.runner.leaves[0], new["kernel"])
