"""The arithmetic of a throughput report, and the workload."""

import dataclasses

import pytest

from jaxinfer.bench.report import RequestTimes, ThroughputReport
from jaxinfer.bench.workload import LengthRange, random_workload
from jaxinfer.engine.stats import EngineStats

NOTHING = EngineStats(**dict.fromkeys((item.name for item in dataclasses.fields(EngineStats)), 0))


def test_arithmetic() -> None:
    times = [
        RequestTimes(10, 5, arrival=100.0, first_token=101.0, last_token=103.0, finished=103.0),
        RequestTimes(30, 2, arrival=100.0, first_token=102.0, last_token=105.0, finished=105.0),
        RequestTimes(20, 1, arrival=101.0, first_token=102.0, last_token=102.0, finished=102.0),
    ]
    before = dataclasses.replace(NOTHING, busy_seconds=1.0, device_seconds=1.0, num_compiled=4, num_preemptions=1)
    after = dataclasses.replace(
        NOTHING,
        busy_seconds=5.0,
        device_seconds=4.0,
        num_compiled=6,
        num_preemptions=4,
        kv_waste_mean=0.125,
        kv_waste_worst=0.5,
    )
    report = ThroughputReport.of(times, before, after, seconds=8.0, static=False)
    assert (report.mode, report.num_requests, report.total_time) == ("continuous", 3, 8.0)
    assert (report.prompt_tokens, report.output_tokens, report.total_tokens) == (60, 8, 68)
    assert (report.throughput, report.output_throughput, report.requests_per_second) == (8.5, 1.0, 0.375)
    assert (report.avg_latency, report.p50_latency) == (3.0, 3.0)
    assert report.p99_latency == pytest.approx(4.96)  # 98 % of the way from 3 to 5
    assert (report.avg_ttft, report.p50_ttft) == (pytest.approx(4 / 3), 1.0)
    # Four gaps of 0.5 s and one of 3 s; the third request has none.
    assert report.avg_inter_token_latency == pytest.approx(1.0)
    assert report.p50_inter_token_latency == pytest.approx(1.75)
    assert (report.device_share, report.kv_waste_mean, report.kv_waste_worst) == (0.75, 0.125, 0.5)
    assert (report.preemptions, report.compiles_after_warm_up) == (3, 2)
    text = report.as_text()
    assert len(text.splitlines()) == len(report.as_dict())
    for line in ("8.50 tokens/s", "3000.0 ms", "75.00 %", "0.38 requests/s", "8.00 s"):
        assert line in text


def test_single_tokens_have_no_gaps() -> None:
    report = ThroughputReport.of([RequestTimes(1, 1, 0.0, 1.0, 1.0, 1.0)], NOTHING, NOTHING, seconds=1.0, static=True)
    assert report.avg_inter_token_latency is None and report.mode == "static" and report.device_share == 0.0
    assert "-" in report.as_text()


def test_workload() -> None:
    def make(seed: int) -> object:
        return random_workload(300, LengthRange(2, 4), LengthRange(5, 5), vocab_size=11, max_model_len=9, seed=seed)

    workload = make(1)
    assert {len(prompt) for prompt in workload.prompts} == {2, 3, 4} and set(workload.output_lens) == {5}
    assert {token for prompt in workload.prompts for token in prompt} == set(range(11))
    assert make(1) == workload and make(2) != workload
    with pytest.raises(ValueError, match="max_model_len=8"):
        random_workload(1, LengthRange(2, 4), LengthRange(5, 5), vocab_size=11, max_model_len=8, seed=0)
    with pytest.raises(ValueError, match="num_prompts=0"):
        random_workload(0, LengthRange(1, 1), LengthRange(1, 1), vocab_size=11, max_model_len=8, seed=0)
    with pytest.raises(ValueError, match="from 0 to 3"):
        LengthRange(0, 3)
