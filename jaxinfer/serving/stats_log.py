"""A line about the engine's load in the log, every now and then."""

import logging
import time

from jaxinfer.engine.replicas import AnyEngine
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

    def tick(self, engine: AnyEngine) -> None:
        """To be called after every step."""
        now = time.monotonic()
        if self._interval is None or now - self._last_time < self._interval:
            return
        stats = engine.stats()
        seconds = now - self._last_time
        computed, generated, queries, hits = (
            value - before for value, before in zip(_counts(stats), _counts(self._last), strict=True)
        )
        logger.info(
            "computed %.1f tokens/s, generated %.1f tokens/s, running %d, waiting %d, preemptions so far %d, "
            "%.1f %% of prompt tokens from the prefix cache",
            computed / seconds,
            generated / seconds,
            stats.num_running,
            stats.num_waiting,
            stats.num_preemptions,
            100 * hits / max(queries, 1),
        )
        self._last_time, self._last = now, stats


def _counts(stats: EngineStats | None) -> tuple[int, int, int, int]:
    if stats is None:
        return 0, 0, 0, 0
    return stats.num_computed_tokens, stats.num_generated_tokens, stats.num_prefix_queries, stats.num_prefix_hits
