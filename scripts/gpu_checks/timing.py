"""Seconds an operation takes on the device, with the host's dispatch hidden behind it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import jax

State = TypeVar("State")

SLOW = 20
"""Two steps that take so many times what a sample should: there is no time for many."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one operation: median, least and most of the samples. `calls` were enqueued in each sample."""

    seconds: float
    least: float
    most: float
    samples: int
    calls: int

    def values(self, claims_times: bool) -> dict[str, Any]:
        """For a record; without times where they mean nothing."""
        counts = {"samples": self.samples, "calls_per_sample": self.calls}
        if not claims_times:
            return counts
        return {"us": self.seconds * 1e6, "us_least": self.least * 1e6, "us_most": self.most * 1e6} | counts


def time_chain(
    step: Callable[[State], State],
    state: State,
    *,
    operations: int,
    samples: int,
    sample_seconds: float,
    rehearse: bool = False,
) -> Timing:
    """Times `step`, whose result is its next argument, so that nothing can overlap or be left out.

    Args:
        step: enqueues a program and returns its result without waiting.
        state: the first argument.
        operations: what one step does, so that the result is for one of them.
        samples: measurements; each lasts about `sample_seconds`, of as many steps as that takes.
        sample_seconds: see there.
        rehearse: one step a sample and two samples.
    """
    state = _run(step, state, 1)[1]
    calls, samples = (1, 2) if rehearse else (0, samples)
    if not rehearse:
        once, state = _run(step, state, 2)
        calls = max(1, min(1000, round(sample_seconds / max(once / 2, 1e-6))))
        if once > SLOW * sample_seconds:
            samples = min(samples, 3)
    seconds = []
    for _ in range(samples):
        elapsed, state = _run(step, state, calls)
        seconds.append(elapsed / (calls * operations))
    return Timing(median(seconds), min(seconds), max(seconds), samples, calls)


def _run(step: Callable[[Any], Any], state: Any, calls: int) -> tuple[float, Any]:
    begin = time.perf_counter()
    for _ in range(calls):
        state = step(state)
    jax.block_until_ready(state)
    return time.perf_counter() - begin, state
