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
    """Counts, from its making on, the machine's busy time that does not belong to process `pid` and its children."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._time, self._others = time.perf_counter(), self._other_seconds()

    def other_load(self, cores: int) -> float:
        """Share (0 to 1) of `cores` that was busy with, or withheld for, somebody else."""
        elapsed = time.perf_counter() - self._time
        return min(max((self._other_seconds() - self._others) / (elapsed * cores), 0.0), 1.0)

    def _other_seconds(self) -> float:
        return _busy_seconds() - _tree_seconds(self._pid)


def _busy_seconds() -> float:
    """Busy seconds of all cores together since boot: user, nice, system, irq, softirq and steal of /proc/stat."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _tree_seconds(root: int) -> float:
    """CPU seconds, so far, of process `root`, its live descendants, and the children that they have waited for."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        pid = int(stat.parent.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(int(field) for field in fields[11:15])
    tree = {root}
    while grown := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= grown
    return sum(ticks.get(pid, 0) for pid in tree) / os.sysconf("SC_CLK_TCK")


def _cpuinfo(key: str) -> str | None:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None
