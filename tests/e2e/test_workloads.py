"""Random workloads through the engine on the real runner give what a generator without cache and batch gives."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams
from jaxinfer.models.config import ModelConfig
from jaxinfer.runner.runner import ModelRunner

CONFIG = ModelConfig(48, 32, 40, 2, 4, 2, max_position_embeddings=64)
EOS = frozenset({0, 7})
NEAR_TIE = 1e-3
LAST_ARRIVAL = 10


class Job(NamedTuple):
    prompt: list[int]
    params: dict[str, Any]
    arrival: int
    abort: int | None


sampling = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 24)},
    optional={
        "min_tokens": st.integers(1, 8),
        "ignore_eos": st.just(True),
        "repetition_penalty": st.just(1.5),
        "frequency_penalty": st.just(1.0),
        "presence_penalty": st.just(1.0),
        "logit_bias": st.sampled_from([{3: 4.0, 9: -4.0}, {7: 6.0}]),
        "allowed_token_ids": st.just(list(range(0, 48, 2))),
        "bad_words": st.just(["x"]),
        "bad_words_token_ids": st.just(((4,), (2, 6), (8, 10, 12))),
        "logprobs": st.just(0),
        "prompt_logprobs": st.just(0),
    },
)
# Either greedy, where numpy says what is right, or seeded, where the same request alone does.
randomness = st.just({"temperature": 0.0}) | st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.7, 1.5]), "seed": st.sampled_from([0, 2**63 - 1])},
    optional={"top_k": st.just(5), "top_p": st.just(0.8), "min_p": st.just(0.1)},
)
jobs = st.lists(
    st.builds(
        Job,
        prompt=st.lists(st.integers(0, 47), min_size=1, max_size=40),
        params=st.builds(dict.__or__, sampling, randomness),
        arrival=st.integers(0, LAST_ARRIVAL),
        abort=st.none() | st.none() | st.integers(0, 30),
    ),
    min_size=1,
    max_size=8,
)


class Naive:
    """The decoder in numpy and float64: no cache, no batch, the whole sequence for every token."""

    def __init__(self, params: Any) -> None:
        self._params = params

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        p, c = self._params, CONFIG
        half = c.head_dim // 2
        angles = np.arange(len(tokens))[:, None] * c.rope_theta ** (-np.arange(half) / half)
        causal = np.tril(np.ones((len(tokens), len(tokens)), bool))
        x = p["embed"]["embedding"][list(tokens)].astype(np.float64)
        for index in range(c.num_hidden_layers):
            layer = p[f"layers_{index}"]
            qkv = np.einsum("td,kghd->tkgh", _norm(x, layer["attn_norm"]), layer["attn"]["qkv"]["kernel"])
            rotated, values = _rotate(qkv[:, :, :-1], angles[:, None, None]), qkv[:, :, -1]
            scores = np.einsum("tkgh,skh->tkgs", rotated[:, :, :-1], rotated[:, :, -1]) / np.sqrt(c.head_dim)
            weights = np.exp(np.where(causal[:, None, None], scores, -np.inf))
            mixed = np.einsum("tkgs,skh->tkgh", weights / weights.sum(-1, keepdims=True), values)
            x = x + np.einsum("tkgh,dkgh->td", mixed, layer["attn"]["out"]["kernel"])
            gate, up = np.einsum("td,gfd->gtf", _norm(x, layer["mlp_norm"]), layer["mlp"]["gate_up"]["kernel"])
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp"]["down"]["kernel"].T
        return _norm(x, p["final_norm"])[-1] @ p["lm_head"]["kernel"].T

    def check(self, prompt: list[int], output: Sequence[int], params: SamplingParams) -> None:
        """Every id of a greedy output is the best one; after a near-tie the rest is excused."""
        for count, token in enumerate(output):
            scores = _adjusted(self.logits([*prompt, *output[:count]]), prompt, list(output[:count]), params)
            best, second = np.sort(scores)[[-1, -2]]
            if best - second < NEAR_TIE:
                return
            assert token == int(np.argmax(scores)), f"token {count}"


def _norm(x: np.ndarray, scale: Any) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.rms_norm_eps) * scale["scale"]


def _rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _adjusted(logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams) -> np.ndarray:
    scores = logits.copy()
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    if params.allowed_token_ids is not None:
        scores[np.setdiff1d(np.arange(48), params.allowed_token_ids)] = -np.inf
    for *before, last in params.bad_words_token_ids:
        if not before or output[-len(before) :] == before:
            scores[last] = -np.inf
    if len(output) < params.min_tokens and not params.ignore_eos:
        scores[list(EOS)] = -np.inf
    for token in {*prompt, *output}:
        scores[token] *= 1 / params.repetition_penalty if scores[token] > 0 else params.repetition_penalty
    for token in set(output):
        scores[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return scores


class NoText:
    """Makes the engine accept bad words, whose ids the jobs bring; nothing asks for text."""

    eos_token_id = None


@pytest.fixture(scope="module")
def engines(random_params: Callable[..., Any]) -> tuple[Engine, Engine, Naive]:
    """One with a pool so small that requests are preempted, one that serves them alone, and the numpy reference."""
    params = random_params(CONFIG, scale=0.35)
    limits = SchedulerConfig(4, 16, 64, token_buckets=(16,))
    made = []
    for num_blocks, caching in ((25, True), (65, False)):
        cache = CacheConfig(4, num_blocks, enable_prefix_caching=caching)
        config = EngineConfig(CONFIG, cache, limits, RunnerConfig(max_logprobs=1))
        tokenizer: Any = NoText()
        made.append(Engine(config, ModelRunner(config, params), tokenizer, eos_token_ids=EOS))
    return made[0], made[1], Naive(params)


def sampling_params(job: Job) -> SamplingParams:
    values = dict(job.params)
    values["max_tokens"] = max(values["max_tokens"], values.get("min_tokens", 1))
    if "bad_words" not in values:
        values.pop("bad_words_token_ids", None)
    elif "bad_words_token_ids" not in values:
        values.pop("bad_words")
    return SamplingParams(**values, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)


def serve(engine: Engine, jobs: Sequence[Job]) -> list[RequestOutput]:
    """The last output of each job. Ids are used again from call to call."""
    last: dict[str, RequestOutput] = {}
    for step in range(2000):
        for index, job in enumerate(jobs):
            if job.arrival == step:
                engine.add_request(str(index), job.prompt, sampling_params(job))
        aborted = engine.abort([str(index) for index, job in enumerate(jobs) if job.abort == step])
        last |= {output.request_id: output for output in [*aborted, *engine.step()]}
        if step > LAST_ARRIVAL and not engine.has_unfinished_requests():
            break
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks and (stats.num_running, stats.num_waiting) == (0, 0)
    assert not engine.is_dead
    return [last[str(index)] for index in range(len(jobs))]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=jobs)
def test_any_workload_equals_naive(engines: tuple[Engine, Engine, Naive], jobs: list[Job]) -> None:
    engine, alone, naive = engines
    for job, output in zip(jobs, serve(engine, jobs), strict=True):
        sample, params = output.outputs[0], sampling_params(job)
        aborted = sample.finish_reason == "abort"
        (reference,) = serve(alone, [job._replace(arrival=0, abort=None)])
        expected = reference.outputs[0]
        if aborted:
            assert sample.token_ids == expected.token_ids[: len(sample.token_ids)]
        else:
            assert (sample.token_ids, sample.finish_reason) == (expected.token_ids, expected.finish_reason)
            assert output.prompt_logprobs is None or len(output.prompt_logprobs) == len(job.prompt)
        if params.is_greedy:
            naive.check(job.prompt, sample.token_ids, params)


def test_the_pool_is_small_enough_for_preemption(engines: tuple[Engine, Engine, Naive]) -> None:
    job = Job([1, 2, 3], {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}, 0, None)
    before = engines[0].stats().num_preemptions
    first, *others = serve(engines[0], [job] * 4)
    assert engines[0].stats().num_preemptions > before
    assert all(other.outputs[0].token_ids == first.outputs[0].token_ids for other in others)
    engines[2].check(job.prompt, first.outputs[0].token_ids, sampling_params(job))
