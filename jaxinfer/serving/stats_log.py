"""A line about the engine's load in the log, every now and then."""

import logging
import time

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.stats import EngineStats

logger = logging.getLogger("jaxinfer")


class StatsLog:
    """Logs throughput since the last line, and what runs and waits, at level INFO.

    Args:
        interval: seconds between two lines at least; None logs nothing.
    """

    def __init__(self, interval: float | None) -> None:
        self._interval = interval
        self._last_time = time.monotonic()
        self._last: EngineStats | None = None

    def tick(self, engine: Engine) -> None:
        """To be called after every step."""
        now = time.monotonic()
        if self._interval is None or now - self._last_time < self._interval:
            return
        stats = engine.stats()
        seconds = now - self._last_time
        computed, generated = stats.num_computed_tokens, stats.num_generated_tokens
        if self._last is not None:
            computed, generated = computed - self._last.num_computed_tokens, generated - self._last.num_generated_tokens
        logger.info(
            "computed %.1f tokens/s, generated %.1f tokens/s, running %d, waiting %d, preemptions so far %d",
            computed / seconds,
            generated / seconds,
            stats.num_running,
            stats.num_waiting,
            stats.num_preemptions,
        )
        self._last_time, self._last = now, stats
