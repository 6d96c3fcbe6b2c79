"""Memory of this machine, for an engine whose device is the CPU. HOST only, never imports jax."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HostMemory:
    """Memory that this process can use, in bytes: all of it, and what is available now."""

    total_bytes: int
    available_bytes: int


def host_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """The machine's memory, or the tightest cgroup limit (v2 or v1) around this process where that is lower.

    MemTotal and MemAvailable of /proc/meminfo; without a /proc the physical memory stands for both. What a cgroup
    could drop from its page cache counts as available.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return HostMemory(physical, physical)
    fields = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest}
    total, available = fields["MemTotal"], fields["MemAvailable"]
    for limit, used in _cgroup_limits(proc, cgroup):
        total = min(total, limit)
        available = min(available, max(limit - used, 0))
    return HostMemory(total, available)


def _cgroup_limits(proc: Path, cgroup: Path) -> Iterator[tuple[int, int]]:
    """(limit, memory in use that cannot be dropped) of every cgroup around this process that has a limit."""
    try:
        memberships = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in memberships:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            yield from _limits_up(cgroup, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroup / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _limits_up(root, path, *names)


def _limits_up(root: Path, path: str, limit_name: str, usage_name: str, cache_field: str) -> Iterator[tuple[int, int]]:
    """Limits from the cgroup at `path` up to the root; inside a container only the root may be visible."""
    folder = root / path.strip("/")
    for group in [folder, *folder.parents]:
        if group != root and root not in group.parents:
            return
        try:
            limit = (group / limit_name).read_text().strip()
            usage = int((group / usage_name).read_text())
        except OSError:
            continue
        if limit != "max":
            yield int(limit), usage - _stat(group / "memory.stat", cache_field)


def _stat(path: Path, field: str) -> int:
    try:
        return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[0] == field), 0)
    except OSError:
        return 0
