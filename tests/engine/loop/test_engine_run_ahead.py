"""Running one step ahead changes nothing, and really runs ahead."""

from collections.abc import Callable
from typing import Any

import pytest

from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams
from jaxinfer.engine.scheduler import Scheduler

PARAMS = [
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(temperature=0, max_tokens=7, stop_token_ids=[5, 9]),
    SamplingParams(temperature=0.8, seed=42, max_tokens=16),
    SamplingParams(temperature=1.3, seed=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=30, min_tokens=10, bad_words=["London", "described"]),
    SamplingParams(temperature=0, max_tokens=1),
    SamplingParams(temperature=0.5, seed=7, max_tokens=25, logit_bias={3: 5.0}),
]
EOS = (3, 30)


def prompts() -> list[list[int]]:
    return [[1 + (i * 7 + j) % 60 for j in range(3 + 11 * i)] for i in range(len(PARAMS))]


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_batched_tokens": 8, "max_num_seqs": 3},
        {"num_blocks": 11, "block_size": 8},
        {"num_blocks": 24, "block_size": 4, "max_num_seqs": 5, "max_num_batched_tokens": 16},
        {"policy": "priority", "num_blocks": 12, "block_size": 8},
    ],
)
@pytest.mark.parametrize("ahead", [True, False])
def test_engine_equals_naive(
    make_harness: Callable, naive: Callable, history: Any, monkeypatch: pytest.MonkeyPatch, limits: dict, ahead: bool
) -> None:
    if not ahead:
        monkeypatch.setattr(Scheduler, "must_sync", property(lambda self: True))
    harness = make_harness(eos=EOS, **limits)
    for index, (prompt, params) in enumerate(zip(prompts(), PARAMS, strict=True)):
        priority = -index if "policy" in limits else 0
        harness.add(str(index), prompt, params, priority=priority)
    outputs = harness.run()
    for index, (prompt, params) in enumerate(zip(prompts(), PARAMS, strict=True)):
        expected = naive(history, prompt, params.with_bad_words(harness.tokenizer), eos=EOS)
        assert outputs[str(index)][-1].outputs[0].token_ids == expected, index
    harness.check_idle()


def test_next_step_is_dispatched_before_the_result_is_awaited(make_harness: Callable) -> None:
    harness = make_harness()
    harness.add("a", (1,), SamplingParams(temperature=0, max_tokens=4))
    assert len(harness.engine.step()) == 1
    assert harness.device.events == [("execute", 0), ("execute", 1), ("result", 0)]
    harness.run()
    # The last token is certain to be the last, so nothing runs beyond it.
    assert harness.device.events[-3:] == [("execute", 3), ("result", 2), ("result", 3)]
    assert len(harness.device.plans) == 4
    assert [plan.rows[0].token_on_device for plan in harness.device.plans] == [False, True, True, True]


def test_many_token_bad_words_wait_for_the_host(make_harness: Callable) -> None:
    harness = make_harness()
    harness.add("a", (1,), SamplingParams(temperature=0, max_tokens=3, bad_words=["described"]))
    harness.run()
    assert [name for name, _ in harness.device.events] == ["execute", "result"] * 3


def test_requests_may_arrive_and_leave_at_any_step(make_harness: Callable, naive: Callable, history: Any) -> None:
    harness = make_harness(max_num_seqs=3, num_blocks=12, block_size=8)
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=15)
    final = {}
    for step in range(40):
        if step < 12:
            harness.add(str(step), [1 + step, 2, 3], params)
        if step % 3 == 2:
            assert all(output.finished for output in harness.engine.abort([str(step - 2), "unknown"]))
        final.update({output.request_id: output for output in harness.engine.step() if output.finished})
    final.update({name: outputs[-1] for name, outputs in harness.run().items()})
    assert any(output.outputs[0].finish_reason == "length" for output in final.values())
    for name, output in final.items():
        ids = output.outputs[0].token_ids
        assert ids == naive(history, [1 + int(name), 2, 3], params)[: len(ids)]
    harness.check_idle()


def test_seeds_belong_to_requests(make_harness: Callable) -> None:
    def ids(seed: int | None, neighbours: int, engine_seed: int = 0) -> list[list[int]]:
        harness = make_harness(seed=engine_seed)
        for index in range(neighbours):
            harness.add(f"n{index}", (4, index), SamplingParams(temperature=1.0, max_tokens=1 + index))
        params = SamplingParams(temperature=0.8, seed=seed, n=2, output_kind=RequestOutputKind.FINAL_ONLY)
        harness.add("a", (1, 2, 3), params)
        return [sample.token_ids for sample in harness.run()["a"][-1].outputs]

    alone = ids(42, 0)
    assert alone == ids(42, 5) == ids(42, 3, engine_seed=9)
    assert alone[0] != alone[1], "the samples of one prompt differ"
    assert ids(0, 0) == ids(0, 4, engine_seed=9), "0 is a seed"
    assert ids(None, 0) == ids(None, 0), "an engine's own seed makes runs repeatable"
    assert ids(None, 0) != ids(None, 0, engine_seed=1)


def test_two_unseeded_requests_differ(make_harness: Callable) -> None:
    harness = make_harness()
    for name in "ab":
        harness.add(name, (1,), SamplingParams(temperature=1.0))
    outputs = harness.run()
    assert outputs["a"][-1].outputs[0].token_ids != outputs["b"][-1].outputs[0].token_ids
