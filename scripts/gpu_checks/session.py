"""What every stage shares: the options, the journal, the device, the clock and the compiling threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from scripts.gpu_checks.journal import Journal
from scripts.gpu_checks.options import Options
from scripts.gpu_checks.programs import Programs
from scripts.gpu_checks.timing import State, Timing, time_chain
from scripts.gpu_checks.torch_peer import TorchPeer

GIB = 1 << 30


@dataclass
class Session:
    """One worker's run.

    Attributes:
        options, journal, programs, torch: see their classes.
        begin: `time.monotonic()` at the start.
    """

    options: Options
    journal: Journal
    programs: Programs
    torch: TorchPeer
    begin: float = field(default_factory=time.monotonic)

    @property
    def implementation(self) -> str:
        """What our kernels are called with."""
        return "triton-interpret" if self.options.rehearse else "triton"

    def time(self, step: Callable[[State], State], state: State, *, operations: int, sample_seconds: float) -> Timing:
        """`time_chain`, as this run does it."""
        rehearse = self.options.rehearse
        return time_chain(
            step,
            state,
            operations=operations,
            samples=self.samples,
            sample_seconds=sample_seconds,
            rehearse=rehearse,
        )

    @property
    def samples(self) -> int:
        """Measurements of every timed operation."""
        return 7

    @property
    def on_gpu(self) -> bool:
        """Whether programs are run on a GPU."""
        return self.options.compile_for is None and jax.default_backend() == "gpu"

    @property
    def memory_bytes(self) -> int:
        """What JAX may take of the device's memory."""
        if self.options.compile_for is not None:
            return 104 * GIB
        stats: dict[str, Any] = jax.local_devices()[0].memory_stats() or {}
        return int(stats.get("bytes_limit", 8 * GIB))

    def seconds_left(self, share: float = 1.0) -> float:
        """Until `share` of the budget is used."""
        return self.begin + share * self.options.budget - time.monotonic()

    @property
    def copy_bandwidth(self) -> float | None:
        """Bytes read and written per second by the fastest large copy that was measured."""
        rates = [record["gb_per_s"] for record in self.journal.of("bandwidth", "ok") if record.get("copies")]
        return max(rates) * 1e9 if rates else None

    def share_of_bandwidth(self, num_bytes: float, seconds: float) -> dict[str, float]:
        """For a record: the rate at which `num_bytes` moved, and its share of the copy bandwidth if that is known."""
        if not self.options.claims_times:
            return {}
        rates = {"gb_per_s": num_bytes / seconds / 1e9}
        return rates | ({"share": num_bytes / seconds / self.copy_bandwidth} if self.copy_bandwidth else {})

    def wrong_kernels(self) -> set[str]:
        """The kernels that gave wrong numbers or broke."""
        return {r["kernel"] for r in self.journal.of("correctness", "failed", "crashed") if r.get("kernel")}
