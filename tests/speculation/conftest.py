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
        cache = dataclasses.replace(self.config.cache, num_blocks=fields.pop("blocks", BLOCKS))
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
