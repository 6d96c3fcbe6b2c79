"""The log line about the engine's load."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer.serving import stats_log
from jaxinfer.serving.stats_log import StatsLog


def fake_engine(computed: int, generated: int, hits: int) -> Any:
    stats = SimpleNamespace(
        num_computed_tokens=computed,
        num_generated_tokens=generated,
        num_running=3,
        num_waiting=2,
        num_preemptions=1,
        num_prefix_queries=4 * computed,
        num_prefix_hits=hits,
    )
    return SimpleNamespace(stats=lambda: stats)


def test_a_line_every_interval(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    monkeypatch.setattr(stats_log.time, "monotonic", lambda: now[0])
    caplog.set_level(logging.INFO, logger="jaxinfer")
    log, silent = StatsLog(10.0), StatsLog(None)
    for seconds, *counts in [(5, 50, 5, 0), (5, 200, 50, 80), (9, 300, 60, 90), (11, 600, 90, 500)]:
        now[0] += seconds
        log.tick(fake_engine(*counts))
        silent.tick(fake_engine(*counts))
    held = "running 3, waiting 2, preemptions so far 1"
    assert [record.getMessage() for record in caplog.records] == [
        f"computed 20.0 tokens/s, generated 5.0 tokens/s, {held}, 10.0 % of prompt tokens from the prefix cache",
        f"computed 20.0 tokens/s, generated 2.0 tokens/s, {held}, 26.2 % of prompt tokens from the prefix cache",
    ]
