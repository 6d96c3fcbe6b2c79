"""Drafts that are trees: whatever they hold, greedy and seeded requests get what plain decoding gives."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from jaxinfer.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig, SpeculationConfig
from jaxinfer.engine.draft import NO_DRAFT, Draft
from jaxinfer.engine.plan import DraftOutcome
from jaxinfer.engine.request import Request
from jaxinfer.models.config import ModelConfig
from jaxinfer.runner.runner import ModelRunner
from tests.speculation.conftest import Bench, Guesses, eight, serve, summary, token_ids

NODES, DEPTH, SEQS, BLOCKS = 12, 8, 8, 140


class Trees(Guesses):
    """Random trees with what it is told hidden on some branch, in a random order, as far as it goes.

    Args:
        known: the right continuation of each request id.
        share: of each token of the right branch, how often it is there.
        depth: of a tree, at most; 1 gives stars.
        right_first: the right branch has the first indices, so that nothing has to be moved.
    """

    def __init__(
        self,
        known: Mapping[str, Sequence[int]] = {},
        share: float = 1.0,
        depth: int = DEPTH,
        right_first: bool = False,
    ) -> None:
        super().__init__(known, share)
        self._depth = depth
        self._right_first = right_first
        self.outcomes: list[DraftOutcome] = []

    def propose(self, rows: Sequence[tuple[Request, int]]) -> list[Draft]:
        return [self._tree(request, count) for request, count in rows]

    def _tree(self, request: Request, count: int) -> Draft:
        done = len(request.output_token_ids)
        right = list(self._known.get(request.request_id, ())[done : done + self._depth])
        right = right[: int(self._rng.integers(len(right) + 1))] if not self._right_first else right
        right = [token if self._rng.random() < self._share else 61 for token in right][:count]
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        last = -1
        while len(tokens) < count:
            left = len(right) - (depths[last] if last >= 0 else 0)
            on_path = left > 0 and (self._right_first or count - len(tokens) <= left or self._rng.random() < 0.4)
            if on_path:
                parent, token = last, right[-left]
            else:
                parent, token = int(self._rng.integers(-1, len(tokens))), int(self._rng.integers(2, 60))
                if parent >= 0 and depths[parent] >= self._depth:
                    parent = -1
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
            parents.append(parent)
            tokens.append(token)
            last = len(tokens) - 1 if on_path else last
        return Draft(tuple(tokens), parents=tuple(parents)) if tokens else NO_DRAFT

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        self.outcomes += outcomes


@pytest.fixture(scope="module")
def trees(small_model: ModelConfig, random_params: Callable[..., Any]) -> Bench:
    return tree_bench(small_model, random_params(small_model, seed=3))


def tree_bench(model: ModelConfig, params: Any, dtype: str = "auto") -> Bench:
    config = EngineConfig(
        model,
        CacheConfig(block_size=4, num_blocks=BLOCKS, dtype=dtype),
        SchedulerConfig(SEQS, 112, 128, token_buckets=(32, 112)),
        RunnerConfig(enforce_eager=True),
        speculation=SpeculationConfig(NODES, max_running=SEQS, tree_depth=DEPTH),
    )
    return Bench(config, ModelRunner(config, params), None, params)


@pytest.fixture(scope="module")
def plain(trees: Bench) -> Any:
    return serve(trees.engine(None), eight())


@pytest.mark.parametrize("depth", [1, 3, 5, 8])
@pytest.mark.parametrize("share", [1.0, 0.7, 0.0])
def test_ids_are_those_of_plain_decoding(trees: Bench, plain: Any, depth: int, share: float) -> None:
    proposer = Trees(token_ids(plain), share, depth)
    engine = trees.engine(proposer, NODES)
    assert summary(serve(engine, eight())) == summary(plain)
    stats = engine.stats().speculation
    assert stats is not None and len(stats.num_drafted_per_position) == depth
    if share == 0.0:
        assert stats.acceptance_length < 1.2
    else:
        moved = [outcome.path for outcome in proposer.outcomes if outcome.path != tuple(range(len(outcome.path)))]
        assert len(moved) > 10 and stats.acceptance_length > (1.4 if depth > 1 else 1.2)
