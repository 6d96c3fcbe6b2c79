"""Drafts that are trees: whatever they hold, greedy and seeded requests get what plain decoding gives."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from jaxinfer.engine.draft import NO_DRAFT, Draft
from jaxinfer.engine.plan import DraftOutcome
from jaxinfer.engine.request import Request
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.models.config import ModelConfig
from tests.speculation.conftest import (
    DEPTH,
    EOS,
    NODES,
    Bench,
    Guesses,
    assert_same_logprobs,
    eight,
    prompt,
    serve,
    summary,
    token_ids,
    tree_bench,
)


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


@pytest.mark.parametrize("depth", [1, 3, 5, 8])
@pytest.mark.parametrize("share", [1.0, 0.7, 0.0])
def test_ids_are_those_of_plain_decoding(trees: Bench, plain: Any, depth: int, share: float) -> None:
    proposer = Trees(token_ids(plain), share, depth)
    engine = trees.engine(proposer, NODES)
    assert summary(serve(engine, eight())) == summary(plain)
    stats = engine.stats().speculation
    assert stats is not None and len(stats.num_drafted_per_position) == depth
    if share == 0.0:
        assert stats.acceptance_length < 1.4  # by chance: many of 58 ids are in a tree
    else:
        moved = [outcome.path for outcome in proposer.outcomes if outcome.path != tuple(range(len(outcome.path)))]
        assert len(moved) > 10 and stats.acceptance_length > (1.4 if depth > 1 else 1.2)


def test_in_a_small_pool_and_alone(trees: Bench, plain: Any) -> None:
    engine = trees.engine(Trees(token_ids(plain), 0.9, 5), NODES, blocks=36)
    assert summary(serve(engine, eight())) == summary(plain)
    assert engine.stats().num_preemptions > 0
    for index in (1, 2):
        known = {"0": token_ids(plain)[str(index)]}
        alone = serve(trees.engine(Trees(known, 0.9, 3), 7, tree_depth=3), [eight()[index]])
        assert token_ids(alone)["0"] == token_ids(plain)[str(index)]


def test_every_sampling_parameter_sees_the_path_before_its_position(trees: Bench, specials: Any) -> None:
    """Field cases 1 and 24: penalties, bans, biases and log-probabilities on every branch."""
    requests, expected = specials
    proposer = Trees(token_ids(expected), 0.9, 4)
    served = serve(trees.engine(proposer, NODES), requests)
    assert summary(served) == summary(expected)
    for request_id, output in served.items():
        assert_same_logprobs(output, expected[request_id])
    assert sum(len(outcome.path) for outcome in proposer.outcomes) > 100


def test_ends_inside_an_accepted_branch_cut_where_plain_decoding_does(trees: Bench) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    long = token_ids(serve(trees.engine(None), [(prompt(9, 6), params)]))["0"]
    place = next(index for index in range(4, 20) if long[index] not in long[:index])
    requests = [
        (prompt(9, 6), SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[long[place]], ignore_eos=True)),
        (prompt(9, 6), SamplingParams(temperature=0, max_tokens=place, ignore_eos=True)),
        (prompt(9, 6), SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)),  # to max_model_len
        *((prompt(seed, 4), SamplingParams(temperature=1.0, seed=seed, max_tokens=60)) for seed in range(5)),
    ]
    expected = serve(trees.engine(None), requests)
    ended = [output.outputs[0] for output in expected.values() if output.outputs[0].finish_reason == "stop"]
    assert len(ended) > 1 and any(sample.token_ids[-1] == EOS for sample in ended)
    assert len(expected["2"].outputs[0].token_ids) == 128 - 6
    known = {name: [*ids, *[5] * 9] for name, ids in token_ids(expected).items()}
    for right_first in (False, True):
        engine = trees.engine(Trees(known, right_first=right_first), NODES)
        assert summary(serve(engine, requests)) == summary(expected)
    assert engine.stats().speculation.num_accepted_per_position[7] >= 4


def test_aborting_and_sleeping_amid_a_verification(trees: Bench, plain: Any) -> None:
    """A request that lost its blocks, or its life, while its tree was in flight, or between its moves and the step that
    makes them; then the pool is an empty one."""
    engine = trees.engine(Trees(token_ids(plain), 0.9), NODES)
    for index, (ids, params) in enumerate(eight()):
        engine.add_request(str(index), ids, params)
    served: dict[str, Any] = {}
    for count in range(5):
        served |= {output.request_id: output for output in engine.step() if output.finished}
        if count % 2:
            engine._fill()
        assert engine.reset_prefix_cache(reset_running_requests=True) or count
        engine.scheduler.check_integrity()
    served |= {output.request_id: output for output in engine.step() if output.finished}
    engine.abort("2")
    served |= {output.request_id: output for output in engine.suspend() if output.finished}
    trees.runner.release_kv()
    trees.runner.restore_kv()
    engine.resume()
    while engine.has_unfinished_requests():
        served |= {output.request_id: output for output in engine.step() if output.finished}
        engine.scheduler.check_integrity()
    assert engine.scheduler.block_manager.num_used_blocks == 0
    expected = {name: value for name, value in summary(plain).items() if name != "2"}
    assert {name: value for name, value in summary(served).items() if name != "2"} == expected


def test_a_request_with_trees_leaves_the_pool_like_one_without(trees: Bench, plain: Any) -> None:
    """Field case 18: what follows prompt and output is computed from the cached blocks of a run with trees that held,
    and whose branches were wrong."""
    ids, params = eight()[2]
    engine = trees.engine(Trees({"0": token_ids(plain)["2"]}), NODES)
    first = token_ids(serve(engine, [(ids, params)]))["0"]
    hits = engine.stats().num_prefix_hits
    after = [(ids + first, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=2))]
    longer, fresh = serve(engine, after), serve(trees.engine(None), after)
    assert engine.stats().num_prefix_hits - hits > len(ids)
    assert token_ids(longer) == token_ids(fresh)
    assert_same_logprobs(longer["0"], fresh["0"])


def test_windows_soft_caps_and_a_pool_of_codes(small_model: ModelConfig, random_params: Callable[..., Any]) -> None:
    """A layer with a window and one without, of int8."""
    fields = {"num_hidden_layers": 2, "sliding_window": 9, "window_layers": (True, False), "attn_softcap": 20.0}
    model = dataclasses.replace(small_model, **fields)
    bench = tree_bench(model, random_params(model, seed=5), "int8")
    requests = [(prompt(seed, 4 + 9 * seed), SamplingParams(temperature=0, max_tokens=30)) for seed in range(4)]
    expected = serve(bench.engine(None), requests)
    engine = bench.engine(Trees(token_ids(expected), 0.9, 5), NODES)
    assert summary(serve(engine, requests)) == summary(expected)
    assert engine.stats().speculation.acceptance_length > 1.4
