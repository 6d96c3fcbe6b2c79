"""EngineStats: what the engine has done so far, and where its time went."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from jaxinfer.engine.scheduler_stats import SchedulerStats
from jaxinfer.engine.speculation_stats import SpeculationStats, sum_of_speculation


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts and times since the engine was made.

    Attributes:
        num_running: samples that hold a slot now.
        num_waiting: samples that wait for one, preempted ones included.
        num_unfinished: requests (prompts, not samples) that have not finished.
        num_blocks: KV blocks that requests can use.
        num_free_blocks: how many of them no request holds; the prefix cache may still know them.
        num_steps: steps completed.
        num_computed_tokens: tokens that went through the model, what preemption repeats included.
        num_generated_tokens: tokens handed to requests.
        num_preemptions: times a request lost its blocks and had to start over.
        num_prefix_queries: prompt tokens of requests that looked into the prefix cache (all but those with
            `prompt_logprobs`; several samples of one prompt count once).
        num_prefix_hits: how many of these it had.
        num_compiled: programs compiled, those of whoever guesses tokens included.
        busy_seconds: wall time with work in the engine, from the first dispatch to the last commit.
        device_seconds: time the device worked on the steps.
        schedule_seconds: host time in `Scheduler.schedule`.
        dispatch_seconds: host time in assembling a step and handing it to the device.
        wait_seconds: host time spent waiting for results.
        commit_seconds: host time in appending tokens, stopping and freeing.
        output_seconds: host time in detokenising and building outputs.
        kv_waste_mean: time-averaged share of allocated KV slots that hold no token and are not reserved for the
            running step, 0 to 1.
        kv_waste_worst: the same of the worst step.
        speculation: what was guessed and what came of it, going on with the engine; None where nothing is.
        replicas: under data parallelism, the statistics of each replica, of which these are the sums; else empty.
    """

    num_running: int
    num_waiting: int
    num_unfinished: int
    num_blocks: int
    num_free_blocks: int
    num_steps: int
    num_computed_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_compiled: int
    busy_seconds: float
    device_seconds: float
    schedule_seconds: float
    dispatch_seconds: float
    wait_seconds: float
    commit_seconds: float
    output_seconds: float
    kv_waste_mean: float
    kv_waste_worst: float
    speculation: SpeculationStats | None = None
    replicas: tuple["EngineStats", ...] = ()

    @property
    def device_share(self) -> float:
        """Share of the busy wall time in which the device worked, 0 to 1."""
        return min(1.0, self.device_seconds / self.busy_seconds) if self.busy_seconds > 0 else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens looked up that the prefix cache had, 0 to 1."""
        return self.num_prefix_hits / self.num_prefix_queries if self.num_prefix_queries else 0.0

    @property
    def host_seconds(self) -> float:
        """Host time other than waiting for the device."""
        return self.schedule_seconds + self.dispatch_seconds + self.commit_seconds + self.output_seconds


@dataclass(slots=True)
class StepClock:
    """Running sums behind EngineStats; the engine adds to them as it goes. All in seconds."""

    busy: float = 0.0
    device: float = 0.0
    schedule: float = 0.0
    dispatch: float = 0.0
    wait: float = 0.0
    commit: float = 0.0
    output: float = 0.0
    num_steps: int = 0
    num_generated_tokens: int = 0


def engine_stats(
    times: StepClock,
    scheduled: SchedulerStats,
    num_unfinished: int,
    num_compiled: int,
    speculation: SpeculationStats | None,
) -> EngineStats:
    """An engine's statistics, from what its parts count."""
    return EngineStats(
        num_running=scheduled.num_running,
        num_waiting=scheduled.num_waiting,
        num_unfinished=num_unfinished,
        num_blocks=scheduled.num_blocks,
        num_free_blocks=scheduled.num_free_blocks,
        num_steps=times.num_steps,
        num_computed_tokens=scheduled.num_tokens,
        num_generated_tokens=times.num_generated_tokens,
        num_preemptions=scheduled.num_preemptions,
        num_prefix_queries=scheduled.num_prefix_queries,
        num_prefix_hits=scheduled.num_prefix_hits,
        num_compiled=num_compiled,
        busy_seconds=times.busy,
        device_seconds=times.device,
        schedule_seconds=times.schedule,
        dispatch_seconds=times.dispatch,
        wait_seconds=times.wait,
        commit_seconds=times.commit,
        output_seconds=times.output,
        kv_waste_mean=scheduled.kv_waste_mean,
        kv_waste_worst=scheduled.kv_waste_worst,
        speculation=speculation,
    )


def sum_of_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """The statistics of several engines that serve together. Counts and times are sums, so that shares and rates are
    those over all of them; `kv_waste_mean` is the mean over their steps, `kv_waste_worst` that of the worst."""
    last = {"kv_waste_mean", "kv_waste_worst", "speculation", "replicas"}
    sums = {
        item.name: sum(getattr(part, item.name) for part in parts)
        for item in fields(EngineStats)
        if item.name not in last
    }
    guesses = [part.speculation for part in parts if part.speculation is not None]
    weights = [max(1, part.num_steps) for part in parts]
    waste = sum(part.kv_waste_mean * weight for part, weight in zip(parts, weights, strict=True))
    return EngineStats(
        **sums,
        kv_waste_mean=waste / sum(weights),
        kv_waste_worst=max(part.kv_waste_worst for part in parts),
        speculation=sum_of_speculation(guesses) if guesses else None,
        replicas=tuple(parts),
    )
