"""Facts of this Linux machine, and how busy others kept it during a measurement."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path


def machine_facts(threads: int) -> dict[str, str]:
    """What a reader needs to place the numbers; `threads` is the number of cores that the engines may use."""
    cpu = _cpuinfo("model name") or platform.processor() or "unknown"
    flags = set((_cpuinfo("flags") or "").split())
    simd = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": time.strftime("%Y-%m-%d"),
        "CPU": f"{cpu}, {simd}",
        "cores": f"{threads} of {os.cpu_count()} used",
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    }


class CpuClock:
    """The machine's busy time since it was made or restarted."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self._busy, self._time = _busy_seconds(), time.perf_counter()

    def other_load(self, own_cpu_seconds: float, cores: int) -> float:
        """Share (0 to 1) of `cores` that was busy with, or withheld for, anything but `own_cpu_seconds` of work."""
        elapsed = time.perf_counter() - self._time
        other = _busy_seconds() - self._busy - own_cpu_seconds
        return min(max(other / (elapsed * cores), 0.0), 1.0)


def _busy_seconds() -> float:
    """Busy seconds of all cores together since boot: user, nice, system, irq, softirq and steal of /proc/stat."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _cpuinfo(key: str) -> str | None:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None
