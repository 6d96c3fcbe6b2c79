"""What callers get: output kinds, samples, metrics, statistics."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from jaxinfer.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def params(kind: RequestOutputKind, **values: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.9, "seed": 3, "max_tokens": 6, "output_kind": kind, **values})


def test_kinds_tell_the_same_story(make_harness: Callable) -> None:
    harness = make_harness()
    for kind in RequestOutputKind:
        harness.add(kind.name, (1, 2), params(kind, n=3, stop_token_ids=[4, 5, 6, 7, 8]))
    outputs = harness.run()
    (final,) = outputs["FINAL_ONLY"]
    assert [sample.index for sample in final.outputs] == [0, 1, 2] and final.finished
    assert len({sample.text for sample in final.outputs}) == 3
    last = outputs["CUMULATIVE"][-1]
    assert last.outputs == final.outputs and last.finished
    for sample in final.outputs:
        deltas = [s for output in outputs["DELTA"] for s in output.outputs if s.index == sample.index]
        assert "".join(delta.text for delta in deltas) == sample.text
        assert [token for delta in deltas for token in delta.token_ids] == sample.token_ids
        assert [delta.finish_reason for delta in deltas][-1] == sample.finish_reason
        assert sum(delta.finished() for delta in deltas) == 1
    for stream in (outputs["CUMULATIVE"], outputs["DELTA"]):
        assert [output.finished for output in stream] == [False] * (len(stream) - 1) + [True]


def test_cumulative_outputs_are_snapshots(make_harness: Callable) -> None:
    harness = make_harness()
    harness.add("a", (1,), params(CUMULATIVE, logprobs=0))
    samples = [output.outputs[0] for output in harness.run()["a"]]
    assert [len(sample.token_ids) for sample in samples] == [1, 2, 3, 4, 5, 6]
    assert [len(sample.logprobs) for sample in samples] == [1, 2, 3, 4, 5, 6]
    assert all(late.text.startswith(early.text) for early, late in pairwise(samples))


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_stream_interval(make_harness: Callable, kind: RequestOutputKind) -> None:
    harness = make_harness()
    harness.add("a", (1,), params(kind, max_tokens=10, stream_interval=4))
    counts = [len(output.outputs[0].token_ids) for output in harness.run()["a"]]
    assert counts == ([1, 5, 9, 10] if kind is CUMULATIVE else [1, 4, 4, 1])


def test_the_end_of_a_sample_does_not_wait_for_the_interval(make_harness: Callable) -> None:
    harness = make_harness()
    first, second = harness.generate((1,), n=2, temperature=0.9, seed=3).outputs
    end = next(i for i, token in enumerate(second.token_ids) if i > 1 and token not in first.token_ids)
    stop = [second.token_ids[end]]
    harness.add("a", (1,), params(DELTA, n=2, max_tokens=16, stream_interval=50, stop_token_ids=stop))
    outputs = harness.run()["a"]
    shown = [[(sample.index, sample.finish_reason) for sample in output.outputs] for output in outputs]
    # The second sample begins when the first has computed the prompt.
    assert shown == [[(0, None)], [(1, None)], [(1, "stop")], [(0, "length")]]


def test_delta_streams_text_only_when_it_is_final(make_harness: Callable, script: Callable) -> None:
    harness = make_harness(script(12, 16, 17, 18, 13))
    harness.add("a", (1,), SamplingParams(temperature=0, max_tokens=5, output_kind=DELTA))
    assert [output.outputs[0].text for output in harness.run()["a"]] == ["hel", "", "", "😀", "lo"]


def test_output_fields(make_harness: Callable) -> None:
    harness = make_harness()
    ids = [1, 2, 3]
    harness.engine.add_request("a", ids, params(FINAL_ONLY), prompt="text")
    ids.append(4)
    (output,) = harness.run()["a"]
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("a", "text", [1, 2, 3])
    assert output.lora_request is None and output.encoder_prompt is None and output.num_cached_tokens == 0
    assert output.outputs[0].routed_experts is None and output.error is None


def test_metrics_and_statistics_on_a_fake_clock(make_harness: Callable) -> None:
    now = [100.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    harness = make_harness(clock=clock, max_num_seqs=1)
    harness.add("a", (1,), params(FINAL_ONLY, max_tokens=3))
    harness.add("b", (1,) * 70, params(FINAL_ONLY, max_tokens=2), arrival_time=50.0)
    outputs = harness.run()
    for name in "ab":
        metrics = outputs[name][0].metrics
        times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time]
        times += [metrics.last_token_time, metrics.finished_time]
        assert times == sorted(times) and metrics.time_in_queue == times[1] - times[0]
    b, a = outputs["b"][0].metrics, outputs["a"][0].metrics
    assert b.arrival_time == 50.0 and b.num_generation_tokens == 2 and a.num_generation_tokens == 3
    # b came first (arrival 50) and its 70 tokens take two steps of 64: it is scheduled well before its first token.
    assert b.first_scheduled_time < b.first_token_time - 5 and a.first_scheduled_time > b.first_token_time
    stats = harness.engine.stats()
    assert (stats.num_generated_tokens, stats.num_running, stats.num_waiting) == (5, 0, 0)
    assert stats.num_computed_tokens == 70 + 1 + 1 + 2
    assert stats.num_steps == len(harness.device.plans) and stats.device_seconds == pytest.approx(
        0.001 * stats.num_steps
    )
    parts = stats.host_seconds + stats.wait_seconds
    assert 0 < parts <= stats.busy_seconds <= now[0] - 100.0
    assert 0 <= stats.device_share <= 1 and 0 <= stats.kv_waste_mean <= stats.kv_waste_worst <= 1


def test_statistics_of_what_is_held_now(make_harness: Callable) -> None:
    harness = make_harness(max_num_seqs=2, num_blocks=9)

    def held() -> tuple[int, int, int, int, int]:
        now = harness.engine.stats()
        return now.num_unfinished, now.num_running, now.num_waiting, now.num_blocks, now.num_free_blocks

    assert held() == (0, 0, 0, 8, 8)
    harness.add("a", (1,) * 20, params(FINAL_ONLY, n=2, max_tokens=4))
    harness.add("b", (1,), params(FINAL_ONLY, max_tokens=4))
    assert held() == (2, 0, 3, 8, 8)
    harness.engine.step()
    # The samples share the prompt's first block; the second has a copy of the other one.
    assert held() == (2, 2, 1, 8, 5)
    harness.engine.abort("a")
    assert held() == (1, 0, 1, 8, 8)
    harness.run()
    assert held() == (0, 0, 0, 8, 8)


def test_idle_time_is_not_busy_time(make_harness: Callable) -> None:
    now = [0.0]
    harness = make_harness(clock=lambda: now[0])
    for _ in range(2):
        harness.generate(max_tokens=3)
        now[0] += 1000.0
    assert harness.engine.stats().busy_seconds == 0.0


def test_final_only_does_no_work_before_the_end(make_harness: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = make_harness()
    harness.add("a", (1,), params(FINAL_ONLY))
    decoded = []
    monkeypatch.setattr(type(harness.tokenizer), "decode", lambda *args, **kwargs: decoded.append(1) or "")
    for _ in range(5):
        assert harness.engine.step() == []
    assert not decoded
    assert harness.engine.step() and decoded


def test_child_ids_do_not_collide_with_those_of_callers(make_harness: Callable) -> None:
    harness = make_harness()
    harness.add("x/1", (1,))
    with pytest.raises(ValueError, match="x/1"):
        harness.add("x", (1,), params(CUMULATIVE, n=2))
    assert harness.engine.num_unfinished_requests == 1
    harness.run()
    harness.check_idle()


def test_reprs_are_readable() -> None:
    sample = CompletionOutput(0, "hi", [5, 6], finish_reason="stop", stop_reason="x")
    output = RequestOutput("a", "p", [1], outputs=[sample], finished=True, metrics=RequestMetrics(1.0))
    assert "text='hi', token_ids=[5, 6]" in repr(sample) and "stop_reason=x" in repr(sample)
    assert repr(sample) in repr(output) and "error" not in repr(output)
    output.error = "why"
    assert "error='why'" in repr(output)
