"""Beam search through the engine loop: whatever the pool, the chunks and the neighbours, the naive search's beams."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.engine.beam_search import BeamSearch
from jaxinfer.engine.beam_search_params import BeamSearchParams
from jaxinfer.engine.errors import EngineAsleepError
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams

ENDS = (5, 6)
PROMPTS = {
    "a": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6],
    "b": [2, 7, 1, 8],
    "c": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 40, 41, 42],
}
AMPLE = {"num_blocks": 200, "block_size": 4}
POOLS = {
    "ample": AMPLE,
    "tight": {"num_blocks": 15, "block_size": 4},  # 14 blocks for three prompts of 4 beams
    "one at a time": {"num_blocks": 10, "block_size": 4},  # 9 blocks: a single longest beam
}


def peaked_logits(context: Any) -> np.ndarray:
    """Logits that depend on every token of the context and its place; ends are likely."""
    values = np.random.default_rng([len(context), *context]).normal(0, 2, size=64)
    values[list(ENDS)] += 2
    return values


def model(prompt: list[int]) -> Callable[[Any], np.ndarray]:
    def logprobs(tokens: Any) -> np.ndarray:
        logits = peaked_logits([*prompt, *tokens])
        return logits - np.log(np.exp(logits).sum())

    return logprobs


def check(output: RequestOutput, expected: list[tuple[list[int], float]], params: BeamSearchParams) -> None:
    assert output.finished and output.error is None
    assert [sample.token_ids for sample in output.outputs] == [ids for ids, _ in expected]
    for index, (sample, (ids, score)) in enumerate(zip(output.outputs, expected, strict=True)):
        assert sample.index == index
        assert sample.cumulative_logprob / len(ids) ** params.length_penalty == pytest.approx(score, abs=1e-4)
        assert sample.finish_reason == ("stop" if ids[-1] in ENDS and not params.ignore_eos else "length")
        assert [next(iter(entry)) for entry in sample.logprobs] == ids
        assert all(entry[token].rank >= 1 for entry, token in zip(sample.logprobs, ids, strict=True))


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("num_batched", [64, 8], ids=["whole", "chunked"])
@pytest.mark.parametrize("hit", [False, True], ids=["cold", "hit"])
@pytest.mark.parametrize("penalty", [1.0, 0.0])
def test_the_naive_beams_in_every_setting(
    make_harness: Any, naive_beam_search: Any, pool: str, num_batched: int, hit: bool, penalty: float
) -> None:
    harness = make_harness(peaked_logits, eos=ENDS, max_num_batched_tokens=num_batched, max_num_seqs=8, **POOLS[pool])
    if hit:
        for name, prompt in PROMPTS.items():
            harness.add(f"warm {name}", prompt, SamplingParams(temperature=0, max_tokens=1))
            harness.run()
    params = BeamSearchParams(4, 12, length_penalty=penalty, include_stop_str_in_output=True)
    beside = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    for name, prompt in PROMPTS.items():
        harness.add(name, prompt, params)
    harness.add("beside", PROMPTS["b"], beside)
    outputs = harness.run()
    for name, prompt in PROMPTS.items():
        (output,) = outputs[name]
        check(output, naive_beam_search(model(prompt), 4, 12, penalty, set(ENDS)), params)
    alone = make_harness(peaked_logits, eos=ENDS, **AMPLE)
    alone.add("beside", PROMPTS["b"], beside)
    assert outputs["beside"][0].outputs[0].token_ids == alone.run()["beside"][0].outputs[0].token_ids
    stats = harness.engine.stats()
    assert pool == "tight" or (stats.num_preemptions > 0) is (pool == "one at a time")
    if pool == "ample" and hit:
        assert outputs["a"][0].num_cached_tokens == 20
    harness.check_idle()


@pytest.mark.parametrize("caching", [True, False])
def test_beams_share_blocks_and_compute_one_token_a_step(make_harness: Any, caching: bool) -> None:
    """21 prompt tokens once, then at most 4 tokens a step: nothing is computed twice."""
    harness = make_harness(peaked_logits, caching=caching, **AMPLE)
    harness.add("a", PROMPTS["a"], BeamSearchParams(4, 10, ignore_eos=True))
    most = 0
    while harness.engine.has_unfinished_requests():
        harness.engine.step()
        most = max(most, harness.engine.scheduler.block_manager.num_used_blocks)
    stats = harness.engine.stats()
    assert stats.num_computed_tokens == 21 + 9 * 4
    assert any(plan.copies for plan in harness.device.plans)
    assert most <= 6 + 4 * 3  # the prompt's blocks are there once
    harness.check_idle()


def test_wider_than_the_slots(make_harness: Any, naive_beam_search: Any) -> None:
    harness = make_harness(peaked_logits, eos=ENDS, max_num_seqs=2, **AMPLE)
    params = BeamSearchParams(6, 5, include_stop_str_in_output=True)
    harness.add("a", PROMPTS["a"], params)
    (output,) = harness.run()["a"]
    check(output, naive_beam_search(model(PROMPTS["a"]), 6, 5, 1.0, set(ENDS)), params)
    harness.check_idle()


def test_ends_and_limits(make_harness: Any, naive_beam_search: Any) -> None:
    harness = make_harness(peaked_logits, eos=ENDS, max_model_len=24, **AMPLE)
    expected = naive_beam_search(model(PROMPTS["a"]), 3, 3, 1.0, set(ENDS))
    harness.add("cut", PROMPTS["a"], BeamSearchParams(3, 100))  # 21 tokens and 3 more
    (output,) = harness.run()["cut"]
    shown = [ids[:-1] if ids[-1] in ENDS else ids for ids, _ in expected]
    assert [sample.token_ids for sample in output.outputs] == shown  # the end itself is not shown
    assert [len(sample.logprobs) for sample in output.outputs] == [len(ids) for ids, _ in expected]
    harness.add("on", PROMPTS["b"], BeamSearchParams(2, 6, ignore_eos=True))
    (output,) = harness.run()["on"]
    without_ends = naive_beam_search(model(PROMPTS["b"]), 2, 6, 1.0, set())
    assert [sample.token_ids for sample in output.outputs] == [ids for ids, _ in without_ends]
    assert {sample.finish_reason for sample in output.outputs} == {"length"}
    with pytest.raises(ValueError, match="max_model_len=24"):
        harness.add("long", [1] * 24, BeamSearchParams(2, 2))


@pytest.mark.parametrize("num_steps", range(0, 9, 2))
def test_abort_at_every_moment(make_harness: Any, num_steps: int) -> None:
    harness = make_harness(peaked_logits, eos=ENDS, num_blocks=16, block_size=4, max_num_batched_tokens=8)
    for name in PROMPTS:
        harness.add(name, PROMPTS[name], BeamSearchParams(4, 12))
    with pytest.raises(ValueError, match="request_id='a' is in use"):
        harness.add("a", [1], BeamSearchParams(1, 1))
    assert harness.engine.num_unfinished_requests == 3
    done = {output.request_id for _ in range(num_steps) for output in harness.engine.step()}
    (aborted,) = harness.engine.abort(["a"]) if "a" not in done else [None]
    assert aborted is None or {sample.finish_reason for sample in aborted.outputs} == {"abort"}
    assert set(harness.run()) | done == {"b", "c"} | ({"a"} & done)
    harness.check_idle()


@pytest.mark.parametrize("num_steps", range(0, 10, 3))
def test_suspended_at_every_moment(make_harness: Any, naive_beam_search: Any, num_steps: int) -> None:
    """As `LLM.sleep` does: what the pool held is gone."""
    harness = make_harness(peaked_logits, eos=ENDS, num_blocks=24, block_size=4, max_num_batched_tokens=8)
    params = BeamSearchParams(4, 12, include_stop_str_in_output=True)
    for name in PROMPTS:
        harness.add(name, PROMPTS[name], params)
    outputs = [output for _ in range(num_steps) for output in harness.engine.step()]
    outputs += harness.engine.suspend()
    assert not harness.engine.can_step
    with pytest.raises(EngineAsleepError):
        harness.engine.step()
    manager = harness.engine.scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks and not manager.cache.keys
    harness.device.pool[:] = -1
    harness.engine.resume()
    outputs += [output for found in harness.run().values() for output in found]
    for output in outputs:
        expected = naive_beam_search(model(PROMPTS[output.request_id]), 4, 12, 1.0, set(ENDS))
        check(output, expected, params)
    assert len(outputs) == 3
    harness.check_idle()


@pytest.mark.parametrize("num_steps", range(1, 9))
def test_a_reset_takes_running_beams_at_every_moment(
    make_harness: Any, naive_beam_search: Any, naive: Any, num_steps: int
) -> None:
    """With a step of theirs in flight, whose candidates come while the beams wait for a slot."""
    harness = make_harness(peaked_logits, eos=ENDS, **AMPLE)
    beside = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    params = BeamSearchParams(3, 6, include_stop_str_in_output=True)
    harness.add("beside", PROMPTS["b"], beside)
    harness.engine.step()
    harness.add("a", PROMPTS["a"], params)
    outputs = {output.request_id: [output] for _ in range(num_steps) for output in harness.engine.step()}
    assert harness.engine.reset_prefix_cache(reset_running_requests=True)
    while harness.engine.has_unfinished_requests():
        outputs |= {output.request_id: [output] for output in harness.engine.step()}
        harness.engine.scheduler.check_integrity()
    check(outputs["a"][0], naive_beam_search(model(PROMPTS["a"]), 3, 6, 1.0, set(ENDS)), params)
    assert outputs["beside"][0].outputs[0].token_ids == naive(peaked_logits, PROMPTS["b"], beside)
    harness.check_idle()


def test_a_beam_that_is_not_finite_ends_its_search_only(make_harness: Any) -> None:
    harness = make_harness(peaked_logits, eos=ENDS, **AMPLE)
    harness.device.poison.add("a/beam2")
    for name in "ab":
        harness.add(name, PROMPTS[name], BeamSearchParams(3, 6))
    outputs = harness.run()
    assert "NaN" in outputs["a"][0].error and outputs["a"][0].outputs[0].finish_reason == "error"
    assert outputs["b"][0].error is None
    harness.check_idle()


def test_beams_and_requests_have_ids_of_their_own(make_harness: Any, naive_beam_search: Any, naive: Any) -> None:
    """A request that is there first keeps its id, one that comes later is refused; no id reaches another's request."""
    harness = make_harness(peaked_logits, eos=ENDS, **AMPLE)
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    samples = SamplingParams(n=2, seed=3, max_tokens=9, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    params = BeamSearchParams(3, 8, include_stop_str_in_output=True)
    harness.add("a/beam2", PROMPTS["b"], greedy)
    harness.add("a/beam3", PROMPTS["b"], samples)
    harness.add("a", PROMPTS["a"], params)
    for late in ("a/beam1", "a/beam2", "a/beam4", "a/beam77", "a"):
        for wanted in (greedy, params):
            with pytest.raises(ValueError, match=f"request_id='{late}' is in use"):
                harness.add(late, PROMPTS["b"], wanted)
    with pytest.raises(ValueError, match="'a/beam3/1' is in use"):
        harness.add("a/beam3/1", PROMPTS["b"], greedy)
    with pytest.raises(ValueError, match="'a/beam9' is in use"):
        harness.engine.fork("a/beam2", "a/beam9", greedy)
    for fine in ("a/beam", "a/beamx", "c/beam2", "/beam2"):
        harness.add(fine, PROMPTS["b"], greedy)
    outputs = harness.run()
    check(outputs["a"][0], naive_beam_search(model(PROMPTS["a"]), 3, 8, 1.0, set(ENDS)), params)
    for name in ("a/beam2", "a/beam", "a/beamx", "c/beam2", "/beam2"):
        assert outputs[name][0].outputs[0].token_ids == naive(peaked_logits, PROMPTS["b"], greedy)
    assert len(outputs["a/beam3"][0].outputs) == 2
    harness.check_idle()


def test_a_search_that_fails_on_the_host_ends_alone(
    make_harness: Any, naive_beam_search: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(peaked_logits, eos=ENDS, **AMPLE)
    params = BeamSearchParams(3, 6, include_stop_str_in_output=True)
    advance = BeamSearch.advance

    def advance_widths_of_3(search: BeamSearch, candidates: Any) -> Any:
        if search.beam_width == 2 and search.beams[0].length == 2:
            raise OverflowError("too large")
        return advance(search, candidates)

    monkeypatch.setattr(BeamSearch, "advance", advance_widths_of_3)
    harness.add("bad", PROMPTS["b"], BeamSearchParams(2, 6, ignore_eos=True))
    harness.add("a", PROMPTS["a"], params)
    outputs = harness.run()
    assert outputs["bad"][0].error == "the beam search failed (OverflowError: too large)"
    assert {sample.finish_reason for sample in outputs["bad"][0].outputs} == {"error"}
    check(outputs["a"][0], naive_beam_search(model(PROMPTS["a"]), 3, 6, 1.0, set(ENDS)), params)
    harness.check_idle()


def test_a_dead_engine_ends_searches(make_harness: Any) -> None:
    harness = make_harness(peaked_logits, **AMPLE)
    harness.device.fail_in_result_of = 2
    harness.add("a", PROMPTS["a"], BeamSearchParams(3, 6))
    (output,) = harness.run()["a"]
    assert "out of memory" in output.error
    assert not harness.engine.has_unfinished_requests()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(10, 40),
    block_size=st.sampled_from([2, 4, 16]),
    num_seqs=st.integers(1, 8),
    num_batched=st.integers(8, 64),
    caching=st.booleans(),
)
def test_mixes(
    make_harness: Any,
    naive_beam_search: Any,
    seed: int,
    num_blocks: int,
    block_size: int,
    num_seqs: int,
    num_batched: int,
    caching: bool,
) -> None:
    """Searches come and go among ordinary requests, some are aborted, the pool loses what it holds."""
    rng = random.Random(seed)
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "caching": caching}
    harness = make_harness(
        peaked_logits, eos=ENDS, max_num_seqs=num_seqs, max_num_batched_tokens=num_batched, max_model_len=19, **sizes
    )
    asked: dict[str, tuple[list[int], Any]] = {}
    done: dict[str, RequestOutput] = {}
    while len(asked) < 6 or harness.engine.has_unfinished_requests():
        if len(asked) < 6 and rng.random() < 0.4:
            name, prompt = str(len(asked)), PROMPTS["a"][: rng.randint(1, 12)]
            asked[name] = prompt, random_params(rng)
            harness.add(name, *asked[name])
        if asked and rng.random() < 0.02:
            done |= {output.request_id: output for output in harness.engine.abort(rng.choice(list(asked)))}
        if rng.random() < 0.03:
            done |= {output.request_id: output for output in harness.engine.suspend()}
            harness.device.pool[:] = -1
            harness.engine.resume()
        if rng.random() < 0.05:
            harness.engine.reset_prefix_cache(reset_running_requests=True)
        done |= {output.request_id: output for output in harness.engine.step() if output.finished}
        harness.engine.scheduler.check_integrity()
    harness.check_idle()
    for name, (prompt, params) in asked.items():
        reasons = {sample.finish_reason for sample in done[name].outputs}
        if isinstance(params, BeamSearchParams) and "abort" not in reasons:
            width, length = params.beam_width, min(params.max_tokens, 19 - len(prompt))
            check(done[name], naive_beam_search(model(prompt), width, length, 1.0, set(ENDS)), params)
        elif "abort" not in reasons:
            alone = make_harness(peaked_logits, eos=ENDS, max_model_len=19, **AMPLE)
            alone.add(name, prompt, params)
            (expected,) = alone.run()[name]
            ids = [[sample.token_ids for sample in output.outputs] for output in (done[name], expected)]
            assert ids[0] == ids[1]


def random_params(rng: random.Random) -> SamplingParams | BeamSearchParams:
    if rng.random() < 0.6:
        return BeamSearchParams(rng.randint(1, 4), rng.randint(1, 9), include_stop_str_in_output=True)
    n = rng.choice([1, 3])
    values = {"temperature": 1.0, "seed": 5} if n > 1 else {"temperature": 0.0}
    return SamplingParams(n=n, max_tokens=8, output_kind=RequestOutputKind.FINAL_ONLY, **values)
