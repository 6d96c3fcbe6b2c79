"""EAGLE heads of all versions in the engine: what comes out is what plain decoding gives, and the head's layer is what
it would be without a cache, whatever was accepted, evicted or shared."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import CacheConfig, EagleTree, EngineConfig, RunnerConfig, SchedulerConfig, SpeculationConfig
from jaxinfer.engine.draft import Draft
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.request import Request
from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eagle import eagle_config, init_eagle
from jaxinfer.models.eagle3 import eagle3_config, init_eagle3
from jaxinfer.models.eagle_model import TOKEN_IDS, EagleModel
from jaxinfer.runner.eagle_runner import EagleRunner
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.speculation.eagle import EagleProposer
from jaxinfer.speculation.speculator import Speculator
from tests.runner.eagle_naive import NaiveEagle
from tests.speculation.conftest import EOS, serve, summary
from tests.speculation.test_distribution import PROMPT, SETTINGS, exact, p_value

FEW = ModelConfig(
    vocab_size=12, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128,
)  # fmt: skip
SHAPES = {"chain": (5, 1), "tree": (3, 3)}
"""Depth and top-k."""


def random_like(tree: Any, seed: int, scale: float = 0.3) -> Any:
    rng = np.random.default_rng(seed)
    leaves, structure = jax.tree.flatten(tree)
    filled = [(scale * rng.standard_normal(leaf.shape) + (leaf.ndim == 1)).astype(np.float32) for leaf in leaves]
    return jax.tree.unflatten(structure, filled)


def random_head(kind: str, model: ModelConfig) -> tuple[EagleModel, Any, Any]:
    """Head, parameters as `EagleModel` takes them, and the tokens that it guesses among."""
    if kind == "eagle":
        layer = eagle_config(model)
        return EagleModel(model, layer, True), {"head": random_like(init_eagle(layer, jax.random.key(0)), 1)}, None
    ids = np.delete(np.arange(model.vocab_size), [4])
    head = eagle3_config(model, len(ids))
    given = {"head": random_like(init_eagle3(head, jax.random.key(0)), 2), TOKEN_IDS: jnp.asarray(ids, jnp.int32)}
    return EagleModel(model, head), given, ids


class Checked:
    """A proposer whose first trees are compared with those of the head over whole sequences."""

    def __init__(
        self, proposer: EagleProposer, naive: NaiveEagle, shape: tuple[int, int], calls: Sequence[int]
    ) -> None:
        self._proposer, self._naive, self._shape = proposer, naive, shape
        self._calls, self._number = set(calls), 0
        self.num_checked = 0

    def propose(self, rows: Sequence[tuple[Request, int]]) -> list[Draft]:
        drafts = self._proposer.propose(rows)
        for (request, count), draft in zip(rows, drafts, strict=True):
            if self._number in self._calls and request.num_known_tokens < 50:
                ids = request.token_ids(0, request.num_known_tokens)
                best = self._naive.tree(ids, *self._shape, count)
                assert list(draft.token_ids) == [token for token, *_ in best]
                assert not draft.parents or list(draft.parents) == [parent for _, parent, _ in best]
                self.num_checked += 1
        self._number += 1
        return drafts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)


class EagleBench:
    """A target with a head, one runner for all engines around it."""

    def __init__(self, kind: str, model: ModelConfig, params: Any, seqs: int = 8, nodes: int = 9) -> None:
        self.params = params
        self.model, given, ids = random_head(kind, model)
        self.naive = NaiveEagle(model, params, self.model.head, given["head"], ids)
        trees = {name: EagleTree(self.model.layer, *shape, 8) for name, shape in SHAPES.items()}
        tokens = (1 + nodes) * seqs
        self.config = EngineConfig(
            model,
            CacheConfig(block_size=4, num_blocks=16 * seqs),
            SchedulerConfig(seqs, tokens, 96, token_buckets=(tokens,)),
            RunnerConfig(enforce_eager=True),
            speculation=SpeculationConfig(
                min(8, nodes), max_running=seqs, tree_depth=min(8, nodes), features="eagle", eagle=trees["tree"]
            ),
        )
        self.runner = ModelRunner(self.config, params)
        self.runner.use_eagle(self.model, given)
        self.loops = {name: EagleRunner(self.runner, tree) for name, tree in trees.items()}

    def engine(self, shape: str | None, tokens: int = 8, blocks: int = 0, check: Sequence[int] = ()) -> Any:
        """An engine that verifies `tokens` nodes of these trees, or none, and its proposer."""
        cache = dataclasses.replace(self.config.cache, num_blocks=blocks or self.config.cache.num_blocks)
        assert self.config.speculation is not None
        guess = dataclasses.replace(self.config.speculation, num_tokens=tokens, tree_depth=min(8, tokens))
        config = dataclasses.replace(self.config, cache=cache, speculation=guess if shape else None)
        if shape is None:
            return Engine(config, self.runner, None, eos_token_ids=frozenset({EOS})), None
        proposer = Checked(EagleProposer(self.loops[shape], shape == "chain"), self.naive, SHAPES[shape], check)
        speculator = Speculator(guess, proposer)
        return Engine(config, self.runner, None, eos_token_ids=frozenset({EOS}), speculation=speculator), proposer


@pytest.fixture(scope="module")
def params(random_params: Callable[..., Any]) -> Any:
    return jax.tree.map(jnp.asarray, random_params(FEW, seed=3))


@pytest.fixture(scope="module")
def bench(params: Any) -> EagleBench:
    return EagleBench("eagle", FEW, params)


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Greedy and seeded, two with a common beginning, with log-probabilities and penalties, and samples of one."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(2, 12, 17).tolist()
    seeded = SamplingParams(temperature=0.9, seed=1, max_tokens=22, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=24)
    return [
        (rng.integers(2, 12, 5).tolist(), greedy),
        (prompt, seeded),
        ([*prompt, 9], dataclasses.replace(seeded, seed=2, top_k=4)),
        ([3], SamplingParams(temperature=0, max_tokens=20, logprobs=2, ignore_eos=True)),
        (rng.integers(2, 12, 30).tolist(), SamplingParams(temperature=0, max_tokens=2)),
        (prompt[:7], SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.3, ignore_eos=True)),
        (prompt[:10], dataclasses.replace(seeded, seed=5, n=2, frequency_penalty=0.4)),
    ]


@pytest.fixture(scope="module")
def plain(bench: EagleBench) -> Any:
    return serve(bench.engine(None)[0], requests())


@pytest.mark.parametrize(("shape", "tokens"), [("chain", 1), ("chain", 5), ("tree", 3), ("tree", 8)])
def test_ids_are_those_of_plain_decoding(bench: EagleBench, plain: Any, shape: str, tokens: int) -> None:
    check_ids(bench, plain, shape, tokens)


@pytest.mark.slow
def test_ids_with_a_head_of_version_3(params: Any, plain: Any) -> None:
    check_ids(EagleBench("eagle3", FEW, params), plain, "tree", 8)


def check_ids(bench: EagleBench, plain: Any, shape: str, tokens: int) -> None:
    engine, proposer = bench.engine(shape, tokens, check=(3, 6))
    served = serve(engine, requests())
    assert summary(served) == summary(plain)
    stats = engine.stats().speculation
    assert stats is not None and stats.num_accepted_tokens > 0
    assert proposer.num_checked > 2
    found, expected = served["3"].outputs[0].logprobs, plain["3"].outputs[0].logprobs
    for entry, reference in zip(found, expected, strict=True):
        assert entry.keys() == reference.keys()
        for token in entry:
            assert entry[token].logprob == pytest.approx(reference[token].logprob, abs=1e-3)


def test_in_a_small_pool_and_alone(bench: EagleBench, plain: Any) -> None:
    engine, proposer = bench.engine("tree", 8, blocks=30, check=(8, 12))
    assert summary(serve(engine, requests())) == summary(plain)
    assert engine.stats().num_preemptions > 0 and proposer.num_checked > 1
    engine, _ = bench.engine("tree", 5)
    assert summary(serve(engine, requests()[1:2]))["0"] == summary(plain)["1"]


EIGHT = dataclasses.replace(FEW, vocab_size=8, num_hidden_layers=1, intermediate_size=64)


@pytest.fixture(scope="module")
def bench_of_64(random_params: Callable[..., Any]) -> EagleBench:
    return EagleBench("eagle", EIGHT, random_params(EIGHT, seed=11, scale=0.15), seqs=64, nodes=3)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_triples_follow_the_distribution(bench_of_64: EagleBench, setting: str) -> None:
    """Unseeded, 64 at a time, trees of 3 nodes: chi-square over 512 triples of a vocabulary of 8."""
    requests, n, options = 2, 10_000, SETTINGS[setting]
    params = SamplingParams(n=n, max_tokens=5, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY, **options)
    engine, _ = bench_of_64.engine("tree", 3)
    for index in range(requests):
        engine.add_request(str(index), PROMPT, params)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    drawn = np.array([sample.token_ids[1:4] for output in outputs for sample in output.outputs])
    counts = np.bincount(drawn @ [64, 8, 1], minlength=512)
    probability = exact(EIGHT, bench_of_64.params, params)
    assert len(drawn) == requests * n and 1.05 < engine.stats().speculation.acceptance_length < 3.0
    assert counts[probability == 0.0].sum() == 0
    assert p_value(counts, probability * requests * n) > 0.001
