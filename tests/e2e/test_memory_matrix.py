"""Whatever the memory does, outputs are those of the plain run: prefix hits, several samples, beams, chunks, preemption
and every cache dtype, in all combinations.

All engines of a cache dtype share one runner, whose programs serve them all, so that nothing but the blocks
differs between them; the plain one computes one request after the other, without cache and without sharing.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest

from jaxinfer.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from jaxinfer.engine.beam_search import BeamSearch, Candidates
from jaxinfer.engine.beam_search_params import BeamSearchParams
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams
from jaxinfer.models.config import ModelConfig
from jaxinfer.runner.runner import ModelRunner

MODEL = ModelConfig(256, 64, 128, 2, 8, 2, max_position_embeddings=64)
NUM_ROWS, STEP, BLOCK, POOL, SMALL_POOL = 8, 32, 4, 120, 14
KV_DTYPES = ("float32", "int8", "fp8_e4m3", "int4")
KINDS = ("n=1", "n=4", "beams")

# Log-probabilities are asked for, so that all that draw run the same program.
ASKED = {"max_tokens": 12, "logprobs": 2, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
PARAMS = {
    "n=1": SamplingParams(temperature=0, **ASKED),
    "n=4": SamplingParams(temperature=0.9, seed=11, n=4, **ASKED),
    "beams": BeamSearchParams(beam_width=3, max_tokens=8),
}
BEGINNING = [(37 * i + 11) % 256 for i in range(18)]  # four blocks and a half
PROMPTS = ([*BEGINNING, 5, 6, 7], [(91 * i) % 256 for i in range(9)], [*BEGINNING, 5], BEGINNING[:16])


class Mix(NamedTuple):
    """How requests are served, and what with."""

    hit: bool
    kind: str
    budget: int
    num_blocks: int


MIXES = [Mix(*values) for values in product((False, True), KINDS, (NUM_ROWS, STEP), (POOL, SMALL_POOL))]


class Served(NamedTuple):
    outputs: list[RequestOutput]
    engine: Engine


class Server:
    """Makes engines of every kind on one runner."""

    def __init__(self, kv_dtype: str, params: Any) -> None:
        self._kv_dtype = kv_dtype
        self.runner = ModelRunner(self._config(STEP, POOL, True), params)
        self._plain: dict[str, list[RequestOutput]] = {}

    def serve(self, mix: Mix) -> Served:
        engine = self._engine(mix.budget, mix.num_blocks)
        if mix.hit:
            engine.add_request("before", [*BEGINNING, 9], PARAMS["n=1"])
            run(engine)
        for place, prompt in enumerate(PROMPTS):
            engine.add_request(str(place), prompt, PARAMS[mix.kind])
        return Served(run(engine), engine)

    def plain(self, kind: str) -> list[RequestOutput]:
        """The reference: one request at a time, one sample at a time, nobody finds or shares anything. (Beams share by
        their nature; what they find is compared with beams that do not, below.)"""
        if kind not in self._plain:
            self._plain[kind] = [output for prompt in PROMPTS for output in self._alone(prompt, kind)]
        return self._plain[kind]

    def _alone(self, prompt: list[int], kind: str) -> list[RequestOutput]:
        engine, params, outputs = self._engine(STEP, POOL, caching=False), PARAMS[kind], []
        if isinstance(params, BeamSearchParams):
            engine.add_request("0", prompt, params)
            return run(engine)
        samples = engine._new_requests("0", prompt, params, 0, None, None)
        engine._outputs.add("0", None, samples)
        for sample in samples:
            engine.scheduler.add(sample)
            while engine.scheduler.has_unfinished:
                outputs += engine.step()
        return outputs

    def beams_by_themselves(self, prompt: list[int]) -> list[tuple[list[int], float]]:
        """Ids and sums of a search that computes every beam in every step from its first token, in a pool of its
        own."""
        params = PARAMS["beams"]
        one = SamplingParams(temperature=0, **{**ASKED, "max_tokens": 1, "logprobs": 3})
        search = BeamSearch(params.beam_width, params.max_tokens, params.length_penalty, frozenset())
        while not search.is_done:
            found = []
            for beam in search.beams:
                engine = self._engine(STEP, POOL, caching=False)
                engine.add_request("0", prompt + beam.token_ids, one)
                entry = run(engine)[0].outputs[0].logprobs[0]
                found.append(Candidates(list(entry), [candidate.logprob for candidate in entry.values()]))
            search.advance(found)
        return [(beam.token_ids, beam.cum_logprob) for beam in search.best()]

    def _engine(self, budget: int, num_blocks: int, caching: bool = True) -> Engine:
        return Engine(self._config(budget, num_blocks, caching), self.runner, None)

    def _config(self, budget: int, num_blocks: int, caching: bool) -> EngineConfig:
        return EngineConfig(
            MODEL,
            CacheConfig(BLOCK, num_blocks + 1, self._kv_dtype, caching),
            SchedulerConfig(NUM_ROWS, budget, 64, token_buckets=(STEP,)),
            RunnerConfig(max_logprobs=3),
        )


def run(engine: Engine) -> list[RequestOutput]:
    """Steps until nothing is left; outputs in the order of their ids. The pool is whole after each step."""
    outputs = []
    for _ in range(1000):
        outputs += engine.step()
        engine.scheduler.block_manager.check_integrity()
        if not engine.has_unfinished_requests():
            break
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks and not engine.is_dead
    return sorted(outputs, key=lambda output: output.request_id)


@pytest.fixture(scope="module", params=KV_DTYPES)
def server(request: pytest.FixtureRequest, random_params: Callable[..., Any]) -> Iterator[Server]:
    made = Server(request.param, random_params(MODEL))
    yield made
    assert made.runner.num_compiled <= 3, "a step with and one without draws, and a copy of blocks"


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join(map(str, mix)))
def test_outputs_are_those_of_the_plain_run(server: Server, mix: Mix) -> None:
    served = server.serve(mix)
    check_equal(served.outputs, server.plain(mix.kind))
    cached = [output.num_cached_tokens for output in served.outputs]
    assert cached[0] == (16 if mix.hit else 0)
    preempted = served.engine.stats().num_preemptions
    assert preempted == 0 if mix.num_blocks == POOL else preempted > 0 or mix.kind == "n=1"


def test_beams_that_share_are_those_that_do_not(server: Server) -> None:
    for prompt, output in list(zip(PROMPTS, server.plain("beams"), strict=True))[:2]:
        expected = server.beams_by_themselves(prompt)
        assert [sample.token_ids for sample in output.outputs] == [ids for ids, _ in expected]
        sums = [sample.cumulative_logprob for sample in output.outputs]
        assert sums == pytest.approx([total for _, total in expected], abs=1e-3)


def check_equal(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """The same ids; log-probabilities to 1e-3 (field cases' rule; there is no near-tie among these)."""
    assert len(outputs) == len(expected)
    for output, reference in zip(outputs, expected, strict=True):
        for sample, other in zip(output.outputs, reference.outputs, strict=True):
            assert sample.token_ids == other.token_ids
            assert sample.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
            for entry, other_entry in zip(sample.logprobs or (), other.logprobs or (), strict=True):
                assert list(entry) == list(other_entry)
                values = [(logprob.logprob, logprob.rank) for logprob in entry.values()]
                other_values = [(logprob.logprob, logprob.rank) for logprob in other_entry.values()]
                for (value, rank), (other_value, other_rank) in zip(values, other_values, strict=True):
                    assert value == pytest.approx(other_value, abs=1e-3) and rank == other_rank
