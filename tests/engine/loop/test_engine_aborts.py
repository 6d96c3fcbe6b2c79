"""Aborting at any moment frees everything: the engine's half of field case 6."""

from collections.abc import Callable

import pytest

from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams

LONG = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 10])
def test_abort_after_some_steps(make_harness: Callable, num_steps: int) -> None:
    harness = make_harness()
    expected = harness.generate((9, 9)).outputs[0].token_ids
    harness.add("a", (1,) * 100, LONG)
    for _ in range(num_steps):
        harness.engine.step()
    (output,) = harness.engine.abort("a")
    assert output.finished and output.outputs[0].finish_reason == "abort" and output.outputs[0].stop_reason is None
    assert harness.engine.num_unfinished_requests == 0
    harness.check_idle()
    assert harness.generate((9, 9)).outputs[0].token_ids == expected


def test_abort_of_a_waiting_request_runs_nothing(make_harness: Callable) -> None:
    harness = make_harness(max_num_seqs=1)
    harness.add("a", (1,), SamplingParams(temperature=0, max_tokens=5))
    harness.add("b", (2,), LONG)
    harness.engine.step()
    (output,) = harness.engine.abort(["b"])
    assert output.outputs[0].token_ids == []
    harness.run()
    assert {row.request.request_id for plan in harness.device.plans for row in plan.rows} == {"a"}


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_abort_ends_all_samples(make_harness: Callable, kind: RequestOutputKind) -> None:
    harness = make_harness()
    harness.add("a", (1,), SamplingParams(n=3, max_tokens=500, ignore_eos=True, output_kind=kind))
    for _ in range(4):
        harness.engine.step()
    (output,) = harness.engine.abort("a")
    assert [sample.finish_reason for sample in output.outputs] == ["abort"] * 3
    assert output.finished and output.metrics.finished_time is not None
    harness.check_idle()


def test_abort_twice_unknown_and_after_the_end(make_harness: Callable) -> None:
    harness = make_harness()
    harness.add("a", (1,), LONG)
    assert len(harness.engine.abort(["a", "a", "unknown"])) == 1
    assert harness.engine.abort("a") == harness.engine.abort(["unknown"]) == harness.engine.abort([]) == []
    harness.generate()
    assert harness.engine.abort("only") == []


def test_held_back_text_comes_with_the_abort(make_harness: Callable, script: Callable) -> None:
    harness = make_harness(script(12, 13, 16))  # "hel" "lo" and half of a character
    harness.add("a", (1,), SamplingParams(temperature=0, stop=["loud"], output_kind=RequestOutputKind.DELTA))
    texts = [output.outputs[0].text for _ in range(3) for output in harness.engine.step()]
    (last,) = harness.engine.abort("a")
    assert "".join(texts) == "hel" and last.outputs[0].text == "lo\ufffd"


def test_hundred_rounds_of_start_and_abort(make_harness: Callable) -> None:
    harness = make_harness(num_blocks=12)
    for index in range(100):
        harness.add(str(index), (1,) * 30, LONG)
        for _ in range(index % 4):
            harness.engine.step()
        harness.engine.abort(str(index))
        harness.check_idle()
    assert harness.generate().finished
