"""SchedulerStats: the scheduler's counters at one moment."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts since the scheduler was made, and what it holds now.

    Attributes:
        num_running: requests that hold a slot.
        num_waiting: requests that wait for one, preempted ones included.
        num_blocks: KV blocks that can be allocated.
        num_free_blocks: how many of them no request owns, those in the prefix cache included.
        num_steps: steps scheduled.
        num_tokens: tokens scheduled, those computed again after a preemption included.
        num_preemptions: times a request lost its blocks.
        num_prefix_queries: prompt tokens of admitted requests that looked into the prefix cache.
        num_prefix_hits: how many of these it had.
        kv_waste_mean: time-averaged share of allocated KV slots that hold no token and are not reserved for the
            running step, 0 to 1, over committed steps.
        kv_waste_worst: the same of the worst step.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_steps: int
    num_tokens: int
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int
    kv_waste_mean: float
    kv_waste_worst: float
