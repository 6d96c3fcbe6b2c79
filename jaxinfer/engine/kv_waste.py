"""KV waste: allocated cache slots that hold nothing."""

from collections.abc import Iterable

from jaxinfer.engine.request import Request


def count_slots(num_used_blocks: int, block_size: int, running: Iterable[Request]) -> tuple[int, int]:
    """Allocated KV slots, and how many of them hold a token; what several requests share counts once."""
    num_slots = num_used_blocks * block_size
    # Only the ends of tables are empty, and whoever shares one is about to copy it.
    num_empty = sum(len(request.block_ids) * block_size - request.num_computed_tokens for request in running)
    return num_slots, max(0, num_slots - num_empty)


class KVWaste:
    """Statistics of the share of allocated KV slots that hold no token and are not reserved for the running step."""

    def __init__(self) -> None:
        self.worst = 0.0
        """The largest share of any step, 0 to 1."""
        self._num_steps = 0
        self._sum = 0.0
        self._seconds = 0.0
        self._weighted_sum = 0.0

    def record(self, num_slots: int, num_tokens: int, seconds: float) -> None:
        """Adds a step.

        Args:
            num_slots: tokens that the allocated blocks could hold, at least 1.
            num_tokens: tokens they hold, those that the step writes included.
            seconds: how long the step took.
        """
        share = 1.0 - num_tokens / num_slots
        self.worst = max(self.worst, share)
        self._num_steps += 1
        self._sum += share
        self._seconds += seconds
        self._weighted_sum += share * seconds

    @property
    def mean(self) -> float:
        """The average over time, 0 to 1; over steps while no step has taken any time (a stubbed device)."""
        if self._seconds > 0.0:
            return self._weighted_sum / self._seconds
        return self._sum / self._num_steps if self._num_steps else 0.0
