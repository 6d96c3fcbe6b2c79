"""One small target and its runner for all tests here: engines are made around it, plain ones and guessing ones."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig, SpeculationConfig
from jaxinfer.engine.draft import Draft
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.plan import DraftOutcome
from jaxinfer.engine.request import Request
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.models.config import ModelConfig
from jaxinfer.runner.draft_runner import DraftRunner
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.speculation.draft_model import DraftModelProposer
from jaxinfer.speculation.proposer import Proposer
from jaxinfer.speculation.speculator import Speculator

LONGEST, SEQS, BLOCKS = 8, 8, 100
NODES, DEPTH = 15, 8
"""Of trees."""
EOS = 1
Served = Mapping[str, RequestOutput]


class Guesses:
    """Proposes what it is told for each request id and position, and random tokens where it is told nothing."""

    num_compiled = 0

    def __init__(self, known: Mapping[str, Sequence[int]] = {}, share: float = 1.0) -> None:
        self._known = known
        self._share = share
        self._rng = np.random.default_rng(0)

    def warm_up(self, progress: bool) -> None: ...

    def propose(self, rows: Sequence[tuple[Request, int]]) -> list[Draft]:
        return [Draft(tuple(self._guess(request, count))) for request, count in rows]

    def _guess(self, request: Request, count: int) -> list[int]:
        done = len(request.output_token_ids)
        right = self._known.get(request.request_id, ())[done : done + count]
        guess = self._rng.integers(2, 60, count).tolist()
        for index, token in enumerate(right):
            guess[index] = token if self._rng.random() < self._share else guess[index]
        return guess

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None: ...

    def release(self) -> None: ...

    def restore(self) -> None: ...


@dataclasses.dataclass
class Bench:
    """A target, plain and with any proposer."""

    config: EngineConfig
    runner: ModelRunner
    draft_runner: DraftRunner | None
    params: Any

    def engine(self, proposer: Proposer | None, tokens: int = LONGEST, **fields: Any) -> Engine:
        """An engine that guesses `tokens` ahead, or none at all; `blocks` and `max_running` may be given."""
        cache = dataclasses.replace(self.config.cache, num_blocks=fields.pop("blocks", self.config.cache.num_blocks))
        guess = dataclasses.replace(self.config.speculation, num_tokens=tokens, **fields)
        config = dataclasses.replace(self.config, cache=cache, speculation=guess if proposer else None)
        speculator = Speculator(guess, proposer) if proposer else None
        return Engine(config, self.runner, None, eos_token_ids=frozenset({EOS}), speculation=speculator)

    def drafter(self, params: Any, max_position: int = 256) -> DraftModelProposer:
        """A draft model of these weights. All of them share compiled steps and pool, so one guesses at a time."""
        self.draft_runner._leaves = tuple(jax.device_put(leaf) for leaf in jax.tree.leaves(params))
        cache, scheduler = self.config.cache, self.config.scheduler
        return DraftModelProposer(self.draft_runner, cache.block_size, scheduler.max_num_batched_tokens, max_position)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(6, 60, length).tolist()


def eight() -> list[tuple[list[int], SamplingParams]]:
    """Greedy and seeded requests of different lengths; one repeats itself, two share their beginning."""
    seeded = [SamplingParams(temperature=0.9, seed=seed, top_k=12, max_tokens=24) for seed in range(3)]
    return [
        (prompt(0, 5), SamplingParams(temperature=0, max_tokens=30)),
        (prompt(1, 17), seeded[0]),
        ([7, 8, 9] * 8, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)),
        ([*prompt(1, 17), 9], seeded[1]),
        (prompt(2, 9), SamplingParams(temperature=0, max_tokens=1)),
        (prompt(3, 30), SamplingParams(temperature=0, max_tokens=2)),
        (prompt(4, 3), seeded[2]),
        (prompt(5, 3), SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True, min_p=0.1)),
    ]


def serve(engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]]) -> Served:
    """All finished outputs by id, the requests added at once; blocks and counters are checked at every step."""
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), prompt, params)
    served: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        served |= {output.request_id: output for output in engine.step() if output.finished}
        engine.scheduler.check_integrity()
    assert engine.scheduler.block_manager.num_used_blocks == 0
    return served


def summary(served: Served) -> dict[str, Any]:
    """What has to be the same, whoever guesses."""
    return {
        name: [(sample.token_ids, sample.finish_reason, sample.stop_reason) for sample in output.outputs]
        for name, output in served.items()
    }


def token_ids(served: Served) -> dict[str, list[int]]:
    """Outputs by request id, those of samples by their own ids."""
    found = {}
    for name, output in served.items():
        for sample in output.outputs:
            found[name if len(output.outputs) == 1 else f"{name}/{sample.index}"] = sample.token_ids
    return found


def assert_same_logprobs(output: Any, expected: Any) -> None:
    """Field case 24: one entry for each token, the drawn one in it, as plain decoding has them."""
    for sample, other in zip(output.outputs, expected.outputs, strict=True):
        assert (sample.logprobs is None) == (other.logprobs is None)
        for token, entry, reference in zip(
            sample.token_ids, sample.logprobs or [], other.logprobs or [], strict=sample.logprobs is not None
        ):
            assert token in entry and entry.keys() == reference.keys()
            for key, value in entry.items():
                assert value.rank == reference[key].rank
                assert value.logprob == pytest.approx(reference[key].logprob, abs=1e-3)


def banning(*words: tuple[int, ...]) -> SamplingParams:
    """Bad words by their ids, for an engine without a tokenizer. The bias lets the sampler draw."""
    params = SamplingParams(temperature=0, max_tokens=24, logit_bias={63: -1.0})
    params.bad_words_token_ids = words
    return params


def special(plain: list[int], bans: SamplingParams) -> dict[str, SamplingParams]:
    """Field case 1; `plain` are the ids without any of it."""
    return {
        "repetition": SamplingParams(temperature=0, repetition_penalty=1.5, max_tokens=24),
        "frequency": SamplingParams(temperature=0, frequency_penalty=2.0, max_tokens=24, logprobs=3),
        "presence": SamplingParams(temperature=0.8, seed=4, presence_penalty=1.5, max_tokens=24),
        "bias": SamplingParams(temperature=0, logit_bias={plain[3]: -100.0}, max_tokens=24),
        "bad words": bans,
        "min_tokens": SamplingParams(temperature=0, min_tokens=12, stop_token_ids=plain[2:4], max_tokens=24),
        "allowed": SamplingParams(temperature=0, allowed_token_ids=list(range(2, 20)), max_tokens=24),
        "min_p": SamplingParams(temperature=1.0, seed=7, min_p=0.3, max_tokens=24),
        "top_p": SamplingParams(temperature=0.7, seed=8, top_k=5, top_p=0.8, max_tokens=24),
        "logprobs": SamplingParams(temperature=0, logprobs=3, repetition_penalty=1.2, prompt_logprobs=1, max_tokens=24),
        "samples": SamplingParams(temperature=0.9, seed=3, n=3, frequency_penalty=0.5, logprobs=1, max_tokens=16),
    }


@pytest.fixture(scope="session")
def small_model() -> ModelConfig:
    return ModelConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )


@pytest.fixture(scope="package")
def bench(small_model: ModelConfig, random_params: Callable[..., Any]) -> Bench:
    config = EngineConfig(
        small_model,
        CacheConfig(block_size=4, num_blocks=BLOCKS),
        SchedulerConfig(SEQS, 80, 128, token_buckets=(24, 80)),
        RunnerConfig(enforce_eager=True),
        speculation=SpeculationConfig(LONGEST, max_running=SEQS, keeps_probabilities=True),
    )
    params = random_params(small_model, seed=3)
    return make_bench(config, params)


def make_bench(config: EngineConfig, params: Any) -> Bench:
    runner, steps = ModelRunner(config, params), DraftRunner(config, params, config.model.vocab_size)
    runner.drafted = lambda: steps.drafted
    return Bench(config, runner, steps, params)


@pytest.fixture(scope="package")
def trees(small_model: ModelConfig, random_params: Callable[..., Any]) -> Bench:
    return tree_bench(small_model, random_params(small_model, seed=3))


def tree_bench(model: ModelConfig, params: Any, dtype: str = "auto") -> Bench:
    """The same for trees, with one size of steps."""
    config = EngineConfig(
        model,
        CacheConfig(block_size=4, num_blocks=BLOCKS, dtype=dtype),
        SchedulerConfig(SEQS, 136, 128, token_buckets=(136,)),
        RunnerConfig(enforce_eager=True),
        speculation=SpeculationConfig(NODES, max_running=SEQS, tree_depth=DEPTH),
    )
    return Bench(config, ModelRunner(config, params), None, params)


@pytest.fixture(scope="package")
def plain(bench: Bench) -> Any:
    return serve(bench.engine(None), eight())


@pytest.fixture(scope="package")
def specials(bench: Bench) -> tuple[list[tuple[list[int], SamplingParams]], Any]:
    def ids(params: SamplingParams) -> list[int]:
        return token_ids(serve(bench.engine(None), [(prompt(14, 6), params)]))["0"]

    plain = ids(SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    words = [(63,), tuple(plain[1:3])]
    words.append(tuple(ids(banning(*words))[5:8]))
    banned = ids(banning(*words))
    # Two bans of several tokens are met, each once its first tokens are there.
    assert banned[:2] == plain[:2] and banned[2] != plain[2] and banned[5:7] == list(words[2][:2])
    requests = [(prompt(14, 6), params) for params in special(plain, banning(*words)).values()]
    return requests, serve(bench.engine(None), requests)
