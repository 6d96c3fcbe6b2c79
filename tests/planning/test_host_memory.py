"""Host memory: /proc/meminfo and cgroup limits of both versions, from made-up file trees."""

import pytest

from jaxinfer.planning.host_memory import HostMemory, host_memory

MIB = 2**20


@pytest.fixture
def tree(tmp_path):
    """tree({path: text}) -> (proc, cgroup); 1000 MiB of memory, 800 available, unless meminfo is given."""

    def make(files):
        meminfo = "MemTotal: 1024000 kB\nMemFree: 1 kB\nMemAvailable: 819200 kB\nHugePages_Total: 0\n"
        for path, text in ({"proc/meminfo": meminfo} | files).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(str(text))
        return tmp_path / "proc", tmp_path / "cgroup"

    return make


def test_without_cgroups(tree):
    assert host_memory(*tree({})) == HostMemory(1000 * MIB, 800 * MIB)


def test_v2_limit_of_any_ancestor(tree):
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "cgroup/a/b/memory.max": "max\n",
        "cgroup/a/b/memory.current": 0,
        "cgroup/a/memory.max": 500 * MIB,
        "cgroup/a/memory.current": 300 * MIB,
        "cgroup/a/memory.stat": f"anon 5\ninactive_file {50 * MIB}\n",
    }
    assert host_memory(*tree(files)) == HostMemory(500 * MIB, 250 * MIB)


def test_v2_inside_a_container_where_only_the_root_shows(tree):
    files = {
        "proc/self/cgroup": "0::/kubepods/pod7\n",
        "cgroup/memory.max": 600 * MIB,
        "cgroup/memory.current": 100 * MIB,
    }
    assert host_memory(*tree(files)) == HostMemory(600 * MIB, 500 * MIB)


def test_v1_limit(tree):
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n",
        "cgroup/memory/job/memory.limit_in_bytes": 400 * MIB,
        "cgroup/memory/job/memory.usage_in_bytes": 390 * MIB,
        "cgroup/memory/job/memory.stat": f"total_inactive_file {90 * MIB}\n",
        "cgroup/memory/memory.limit_in_bytes": 2**63 - 4096,
        "cgroup/memory/memory.usage_in_bytes": 0,
    }
    assert host_memory(*tree(files)) == HostMemory(400 * MIB, 100 * MIB)


def test_limits_above_what_there_is_change_nothing(tree):
    files = {"proc/self/cgroup": "0::/\n", "cgroup/memory.max": 10**12, "cgroup/memory.current": 0}
    assert host_memory(*tree(files)) == HostMemory(1000 * MIB, 800 * MIB)


def test_an_exhausted_limit_is_zero_not_negative(tree):
    files = {"proc/self/cgroup": "0::/\n", "cgroup/memory.max": MIB, "cgroup/memory.current": 2 * MIB}
    assert host_memory(*tree(files)).available_bytes == 0


def test_without_proc(tmp_path):
    found = host_memory(tmp_path / "none", tmp_path)
    assert found.total_bytes == found.available_bytes > 0


def test_this_machine():
    found = host_memory()
    assert 0 < found.available_bytes <= found.total_bytes
