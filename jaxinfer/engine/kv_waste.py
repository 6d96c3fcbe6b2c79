"""KV waste: allocated cache slots that hold nothing."""


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
