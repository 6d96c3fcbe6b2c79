"""jaxinfer bench throughput."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.bench.report import RequestTimes, ThroughputReport
from jaxinfer.bench.throughput import measure_throughput
from jaxinfer.bench.workload import Workload
from jaxinfer.startup.args import EngineArgs
from jaxinfer.startup.loading import EngineParts, load_engine

RUN = ["bench", "throughput", "--num-prompts", "6", "--input-len", "4"]


def test_json_and_text(jaxinfer: Any, letters: list[str], tmp_path: Path) -> None:
    words = [*RUN, *letters, "--output-len-range", "2", "9", "--json", "--output-json", tmp_path / "report.json"]
    assert jaxinfer(*words) == 0
    (report,) = jaxinfer.json_lines()
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert report["mode"] == "continuous" and report["num_requests"] == 6 and report["prompt_tokens"] == 24
    assert 12 < report["output_tokens"] < 54
    assert report["total_tokens"] == report["prompt_tokens"] + report["output_tokens"]
    assert report["throughput"] == pytest.approx(report["total_tokens"] / report["total_time"])
    assert 0 < report["avg_ttft"] < report["avg_latency"] <= report["total_time"]
    assert report["p50_latency"] <= report["p99_latency"]
    assert 0 < report["device_share"] <= 1 and 0 < report["kv_waste_mean"] <= report["kv_waste_worst"] < 1
    assert report["compiles_after_warm_up"] > 0  # there was none: enforce_eager
    assert jaxinfer(*RUN, *letters, "--output-len", "3", "--static", "--greedy", "--disable-detokenize") == 0
    lines = dict(line.split(":", 1) for line in jaxinfer.stdout.splitlines())
    assert lines["mode"].strip() == "static" and lines["output_tokens"].strip() == "18"
    assert set(lines) == set(report)


def test_too_long_for_the_model(jaxinfer: Any, letters: list[str]) -> None:
    assert jaxinfer(*RUN, *letters, "--output-len", "2K") == 2
    assert "max_model_len=128" in jaxinfer.stderr


def test_no_prompts_are_refused_before_the_model_is_looked_for(jaxinfer: Any) -> None:
    assert jaxinfer("bench", "throughput", "--model", "/nowhere", "--num-prompts", "0") == 2
    assert "num_prompts=0 must be at least 1" in jaxinfer.stderr


@pytest.fixture
def parts(scripted_checkpoint: Callable[..., Path]) -> EngineParts:
    model = scripted_checkpoint([*b"abcdefgh", 257])
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    return load_engine(EngineArgs(model, enforce_eager=True, use_tqdm_on_load=False, **sizes), None, None)


def test_static_batches_wait_for_their_longest(parts: EngineParts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots, lengths 20 2 20 2: the batches take 20 steps each; continuous batching needs about 22 in all."""
    seen: dict[bool, list[RequestTimes]] = {}
    original = ThroughputReport.of

    def spy(times: list[RequestTimes], *stats: Any, static: bool, **named: Any) -> ThroughputReport:
        seen[static] = times
        return original(times, *stats, static=static, **named)

    monkeypatch.setattr(ThroughputReport, "of", spy)
    workload = Workload([[97]] * 4, [20, 2, 20, 2])
    steps = []
    for static in (False, True):
        before = parts.engine.stats().num_steps
        report = measure_throughput(parts.engine, workload, static=static, greedy=True)
        assert report.output_tokens == 44 and report.num_requests == 4
        steps.append(parts.engine.stats().num_steps - before)
    assert steps[0] <= 26 and 40 <= steps[1] <= 44
    ends = [one.finished for one in seen[True]]
    assert ends[0] == ends[1] < ends[2] == ends[3]
    assert len({one.finished for one in seen[False]}) >= 3
    assert len({one.arrival for one in seen[True]}) == 1  # the second batch's wait counts


def test_a_failed_request_ends_the_run(parts: EngineParts) -> None:
    with pytest.raises(ValueError, match="500"):
        measure_throughput(parts.engine, Workload([[500]], [2]))
    assert not parts.engine.has_unfinished_requests()
