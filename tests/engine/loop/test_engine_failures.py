"""A failed step ends everything with its reason and the engine says so; a row's NaN ends that row's request."""

from collections.abc import Callable

import pytest

from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("where", "words"),
    [("fail_in_result_of", ["RESOURCE_EXHAUSTED", "max_num_seqs"]), ("fail_in_execute_of", ["kernel launch failed"])],
)
def test_failed_step_kills_the_engine(make_harness: Callable, where: str, words: list[str]) -> None:
    harness = make_harness(max_num_seqs=2)
    for name in "abc":
        harness.add(name, (1,), SamplingParams(temperature=0, max_tokens=10))
    harness.engine.step()
    setattr(harness.device, where, 2)
    outputs = [output for _ in range(2) if not harness.engine.is_dead for output in harness.engine.step()]
    last = {output.request_id: output for output in outputs}
    assert set(last) == {"a", "b", "c"}, "waiting requests end too"
    for output in last.values():
        assert output.finished and output.outputs[0].finish_reason == "error"
        assert all(word in output.error for word in words)
    assert last["a"].outputs[0].token_ids, "what was generated is kept"
    assert harness.engine.is_dead and not harness.engine.has_unfinished_requests()
    for call in (harness.engine.step, harness.engine.check_alive, lambda: harness.add("d")):
        with pytest.raises(EngineDeadError, match=words[0]) as caught:
            call()
        assert isinstance(caught.value.__cause__, RuntimeError)
    assert harness.engine.abort(["a", "d"]) == []
    assert harness.engine.stats().num_steps >= 1


def test_failure_inside_the_host_code_is_reported_too(make_harness: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = make_harness()
    harness.add("a")

    def broken(*args: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(harness.engine.scheduler, "commit", broken)
    (output,) = harness.engine.step()
    assert "ZeroDivisionError: oops" in (output.error or "")
    with pytest.raises(EngineDeadError, match="oops"):
        harness.engine.step()


def test_interrupt_while_waiting_loses_nothing(make_harness: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = make_harness()
    expected = harness.generate(max_tokens=6).outputs[0].token_ids
    harness.add("a", (1,), SamplingParams(temperature=0, max_tokens=6))
    harness.engine.step()
    pending = harness.engine._steps[0].pending
    real, calls = pending.result, []

    def interrupted() -> object:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real()

    pending.result = interrupted
    with pytest.raises(KeyboardInterrupt):
        harness.engine.step()
    assert not harness.engine.is_dead
    assert harness.run()["a"][-1].outputs[0].token_ids == expected


def test_interrupt_amid_host_work_kills(make_harness: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = make_harness()
    harness.add("a")

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(harness.engine.scheduler, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        harness.engine.step()
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        harness.engine.step()


def test_idle_step_returns_nothing_and_a_stuck_scheduler_is_an_error(
    make_harness: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness()
    assert harness.engine.step() == [] and not harness.engine.is_dead
    harness.add("a")
    monkeypatch.setattr(harness.engine.scheduler, "schedule", lambda: None)
    (output,) = harness.engine.step()
    assert "1 requests wait" in (output.error or "")


@pytest.mark.parametrize("prompt_length", [1, 100])  # 100: already the first chunk of the prompt shows it
def test_non_finite_row_ends_alone(make_harness: Callable, prompt_length: int) -> None:
    harness = make_harness()
    expected = harness.generate((7,), max_tokens=9).outputs[0].token_ids
    harness.device.poison.add("bad")
    harness.add("good", (7,), SamplingParams(temperature=0, max_tokens=9))
    harness.add("bad", (8,) * prompt_length, SamplingParams(temperature=0, max_tokens=9))
    outputs = harness.run()
    bad = outputs["bad"][-1]
    assert bad.finished and bad.outputs[0].finish_reason == "error" and bad.outputs[0].token_ids == []
    assert "NaN" in (bad.error or "") and "bfloat16" in (bad.error or "") and "float32" in (bad.error or "")
    assert outputs["good"][-1].outputs[0].token_ids == expected and outputs["good"][-1].error is None
    assert not harness.engine.is_dead
    harness.check_idle()


def test_one_broken_sample_of_several_leaves_the_others(make_harness: Callable) -> None:
    harness = make_harness()
    harness.device.poison.add("x/1")
    harness.add("x", (1,), SamplingParams(n=3, seed=1, max_tokens=4))
    final = harness.run()["x"][-1]
    assert [sample.finish_reason for sample in final.outputs] == ["length", "error", "length"]
    assert final.finished and "NaN" in (final.error or "")


def test_rules_that_leave_no_token_end_the_request(make_harness: Callable) -> None:
    # 20 may come once; then the ban on 20 20 leaves nothing of the allow-list.
    harness = make_harness()
    params = SamplingParams(temperature=0, allowed_token_ids=[20], bad_words=["descdesc"])
    harness.add("x", (1,), params)
    final = harness.run()["x"][-1]
    assert (final.outputs[0].token_ids, final.outputs[0].finish_reason) == ([20], "error")
    assert "allowed_token_ids" in (final.error or "")
    harness.check_idle()


def test_rules_with_min_tokens_that_leave_no_token_end_the_request(make_harness: Callable) -> None:
    # After 20 only the EOS 0 is left, and min_tokens masks it.
    harness = make_harness(eos=(0,))
    rules = {"allowed_token_ids": [0, 20], "bad_words": ["descdesc"], "logit_bias": {20: 50.0}}
    assert harness.generate(**rules).outputs[0].token_ids == [20, 0]
    final = harness.generate(**rules, min_tokens=5)
    assert (final.outputs[0].token_ids, final.outputs[0].finish_reason) == ([20], "error")
