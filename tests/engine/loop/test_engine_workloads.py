"""Random workloads through the loop give what a naive generator gives, and leave the pool empty."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams

EOS = (3, 30)
MAX_MODEL_LEN = 96
LAST_ARRIVAL = 15


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    params: dict[str, Any]
    arrival: int
    abort: int | None
    priority: int
    salt: str | None


sampling = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.7, 1.5]), "seed": st.integers(0, 3), "max_tokens": st.integers(1, 30)},
    optional={
        "ignore_eos": st.just(True),
        "stop_token_ids": st.just([5, 6, 7, 8]),
        "bad_words": st.sampled_from([["described"], ["London"], ["a", "b", "hello"]]),
        "logit_bias": st.just({9: 4.0}),
        "logprobs": st.integers(0, 3),
        "prompt_logprobs": st.integers(0, 2),
        "output_kind": st.sampled_from(list(RequestOutputKind)),
    },
)
# Several samples need a temperature.
sampled = st.builds(
    lambda params, n: params | {"n": n if params["temperature"] else 1}, sampling, st.sampled_from([1, 4])
)
# Beginnings that many prompts have in common, of any number of blocks.
beginnings = st.builds(
    lambda seed, length: [(seed * 31 + 7 * i) % 64 for i in range(length)], st.integers(0, 1), st.integers(0, 50)
)
jobs = st.lists(
    st.builds(
        Job,
        prompt=st.builds(list.__add__, beginnings, st.lists(st.integers(0, 63), min_size=1, max_size=10)),
        params=sampled,
        arrival=st.integers(0, LAST_ARRIVAL),
        abort=st.none() | st.none() | st.integers(0, 40),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, "a"]),
    ),
    min_size=1,
    max_size=8,
)


@st.composite
def limits(draw: Callable[[Any], Any]) -> dict[str, Any]:
    num_seqs, size = draw(st.integers(1, 6)), draw(st.sampled_from([1, 4, 16]))
    budget = draw(st.integers(num_seqs, 40))
    return {
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": budget,
        "block_size": size,
        "num_blocks": 1 + draw(st.integers(-(-60 // size), 200 // size)),
        "token_buckets": draw(st.sampled_from([(), (8, 16, 64), (64,)])),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "max_model_len": MAX_MODEL_LEN,
        "caching": draw(st.booleans()),
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=jobs, limits=limits())
def test_any_workload_equals_naive(
    make_harness: Callable, naive: Callable, history: Any, jobs: list[Job], limits: dict[str, Any]
) -> None:
    harness = make_harness(eos=EOS, **limits)
    ids = {(index, sample): [] for index, job in enumerate(jobs) for sample in range(job.params["n"])}
    reasons: dict[tuple[int, int], str] = {}
    finished: set[int] = set()

    def take(outputs: list[RequestOutput]) -> None:
        for output in outputs:
            index = int(output.request_id)
            assert index not in finished, "nothing comes after the end"
            delta = jobs[index].params.get("output_kind") is RequestOutputKind.DELTA
            for sample in output.outputs:
                place = (index, sample.index)
                ids[place] = ids[place] + sample.token_ids if delta else sample.token_ids
                if sample.finish_reason:
                    reasons[place] = sample.finish_reason
            if output.finished:
                finished.add(index)

    for step in range(1000):
        for index, job in enumerate(jobs):
            if job.arrival == step:
                priority = job.priority if limits["policy"] == "priority" else 0
                harness.add(
                    str(index), job.prompt, SamplingParams(**job.params), priority=priority, cache_salt=job.salt
                )
        take(harness.engine.abort([str(index) for index, job in enumerate(jobs) if job.abort == step]))
        take(harness.engine.step())
        harness.engine.scheduler.check_integrity()
        if step > LAST_ARRIVAL and not harness.engine.has_unfinished_requests():
            break
    harness.check_idle()
    assert finished == set(range(len(jobs))) and set(reasons) == set(ids)
    # The token drawn last needs no place in the pool.
    room = min(MAX_MODEL_LEN, (limits["num_blocks"] - 1) * limits["block_size"] + 1)
    for (index, sample), tokens in ids.items():
        job = jobs[index]
        params = SamplingParams(**job.params).with_bad_words(harness.tokenizer)
        expected = naive(history, job.prompt, params, eos=EOS, limit=room, child_index=sample)
        assert tokens == (expected[: len(tokens)] if reasons[index, sample] == "abort" else expected)
