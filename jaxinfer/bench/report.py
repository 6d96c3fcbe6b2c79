"""What a throughput run found."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.stats import EngineStats


@dataclass(frozen=True)
class RequestTimes:
    """One request: tokens, and seconds on the engine's clock."""

    num_prompt_tokens: int
    num_output_tokens: int
    arrival: float
    first_token: float
    last_token: float
    finished: float

    @classmethod
    def of(cls, output: RequestOutput) -> "RequestTimes":
        """The times of a finished request with one sample."""
        metrics = output.metrics
        assert metrics is not None and metrics.first_token_time is not None
        assert metrics.last_token_time is not None and metrics.finished_time is not None
        return cls(
            len(output.prompt_token_ids or ()),
            len(output.outputs[0].token_ids),
            metrics.arrival_time,
            metrics.first_token_time,
            metrics.last_token_time,
            metrics.finished_time,
        )

    def answered_at(self, finished: float) -> "RequestTimes":
        """The same with another end."""
        return replace(self, finished=finished)


@dataclass(frozen=True)
class ThroughputReport:
    """Times are in seconds, shares from 0 to 1.

    Attributes:
        mode: "continuous" or "static".
        num_requests: requests served.
        total_time: from the first request's arrival to the last one's end.
        prompt_tokens, output_tokens, total_tokens: of all requests, the sum of both last.
        throughput: total_tokens per second.
        output_throughput: output_tokens per second.
        requests_per_second: requests by total_time.
        avg_latency, p50_latency, p99_latency: from arrival, time in the queue included, to the answer.
        avg_ttft, p50_ttft, p99_ttft: from arrival to the first token.
        avg_inter_token_latency: between two tokens of a request, over all tokens but the first ones; None when no
            request has two.
        p50_inter_token_latency, p99_inter_token_latency: the same of each request's own average, over requests.
        device_share: share of the time with work in the engine in which the device computed.
        kv_waste_mean: time-averaged share of allocated KV slots that hold no token and are not reserved for the
            running step.
        kv_waste_worst: the same of the worst step.
        preemptions: times a request had to start over.
        compiles_after_warm_up: programs compiled while the workload was served.
    """

    mode: str
    num_requests: int
    total_time: float
    prompt_tokens: int
    output_tokens: int
    total_tokens: int
    throughput: float
    output_throughput: float
    requests_per_second: float
    avg_latency: float
    p50_latency: float
    p99_latency: float
    avg_ttft: float
    p50_ttft: float
    p99_ttft: float
    avg_inter_token_latency: float | None
    p50_inter_token_latency: float | None
    p99_inter_token_latency: float | None
    device_share: float
    kv_waste_mean: float
    kv_waste_worst: float
    preemptions: int
    compiles_after_warm_up: int

    @classmethod
    def of(
        cls, times: Sequence[RequestTimes], before: EngineStats, after: EngineStats, *, seconds: float, static: bool
    ) -> "ThroughputReport":
        """Adds up.

        Args:
            times: of every request, at least one.
            before, after: the engine's statistics around the run.
            seconds: wall time of the run.
        """
        prompt_tokens = sum(one.num_prompt_tokens for one in times)
        output_tokens = sum(one.num_output_tokens for one in times)
        busy = after.busy_seconds - before.busy_seconds
        device = after.device_seconds - before.device_seconds
        avg_gap, p50_gap, p99_gap = _gaps(times)
        return cls(
            mode="static" if static else "continuous",
            num_requests=len(times),
            total_time=seconds,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            total_tokens=prompt_tokens + output_tokens,
            throughput=(prompt_tokens + output_tokens) / seconds,
            output_throughput=output_tokens / seconds,
            requests_per_second=len(times) / seconds,
            **_spread("latency", [one.finished - one.arrival for one in times]),
            **_spread("ttft", [one.first_token - one.arrival for one in times]),
            avg_inter_token_latency=avg_gap,
            p50_inter_token_latency=p50_gap,
            p99_inter_token_latency=p99_gap,
            device_share=min(1.0, device / busy) if busy > 0 else 0.0,
            kv_waste_mean=after.kv_waste_mean,
            kv_waste_worst=after.kv_waste_worst,
            preemptions=after.num_preemptions - before.num_preemptions,
            compiles_after_warm_up=after.num_compiled - before.num_compiled,
        )

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)

    def as_text(self) -> str:
        """A line for each field."""
        return "\n".join(f"{name + ':':<26}{_shown(name, value)}" for name, value in asdict(self).items())


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99])
    return {f"avg_{name}": float(np.mean(values)), f"p50_{name}": float(p50), f"p99_{name}": float(p99)}


def _gaps(times: Sequence[RequestTimes]) -> tuple[float | None, float | None, float | None]:
    """The average over all gaps, and percentiles 50 and 99 of the requests' averages."""
    several = [one for one in times if one.num_output_tokens > 1]
    if not several:
        return None, None, None
    spans = np.array([one.last_token - one.first_token for one in several])
    counts = np.array([one.num_output_tokens - 1 for one in several])
    p50, p99 = np.percentile(spans / counts, [50, 99])
    return float(spans.sum() / counts.sum()), float(p50), float(p99)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name in ("device_share", "kv_waste_mean", "kv_waste_worst"):
        return f"{100 * value:.2f} %"
    if name == "requests_per_second":
        return f"{value:.2f} requests/s"
    if "throughput" in name:
        return f"{value:.2f} tokens/s"
    if "latency" in name or "ttft" in name:
        return f"{1000 * value:.1f} ms"
    return f"{value:.2f} s" if isinstance(value, float) else str(value)
