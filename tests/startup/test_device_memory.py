"""How much of a GPU JAX may use, and what an engine makes of it: with a pretended GPU."""

import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax._src import xla_bridge

from jaxinfer.startup import device_memory as module
from jaxinfer.startup.device_memory import claim_gpu_memory, device_memory

GIB = 2**30


@pytest.fixture
def fresh_gpu_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As if JAX had started nothing yet and would find a GPU; its options are put back."""
    before = jax.config.jax_pjrt_client_create_options
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(module, "_installed_plugins", lambda: ["xla_cuda12"])
    jax.config.update("jax_pjrt_client_create_options", None)
    yield monkeypatch
    jax.config.update("jax_pjrt_client_create_options", before)


@pytest.fixture
def any_platform(fresh_gpu_process: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The test suite runs with jax_platforms "cpu", which would forbid everything."""
    real = module._expects_gpu
    fresh_gpu_process.setattr(module, "_expects_gpu", lambda platforms: real(None))
    return fresh_gpu_process


@pytest.mark.parametrize(("utilization", "fraction"), [(0.3, 0.3), (0.92, 0.92), (1, 0.95)])
def test_the_share_becomes_the_clients_option(any_platform: Any, utilization: float, fraction: float) -> None:
    assert claim_gpu_memory(utilization)
    options = jax.config.jax_pjrt_client_create_options
    assert options == {"memory_fraction": fraction}
    assert type(options["memory_fraction"]) is float  # XLA refuses an int and a str


def test_other_options_stay_and_a_fraction_of_the_callers_wins(any_platform: Any) -> None:
    jax.config.update("jax_pjrt_client_create_options", {"preallocate": False})
    assert claim_gpu_memory(0.5)
    assert jax.config.jax_pjrt_client_create_options == {"preallocate": False, "memory_fraction": 0.5}
    assert not claim_gpu_memory(0.9)
    assert jax.config.jax_pjrt_client_create_options == {"preallocate": False, "memory_fraction": 0.5}


def test_jaxs_environment_variable_wins(any_platform: Any, caplog: pytest.LogCaptureFixture) -> None:
    any_platform.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    assert not claim_gpu_memory(0.9)
    assert jax.config.jax_pjrt_client_create_options is None
    pretend(any_platform, "Some GPU", 40 * GIB)
    with caplog.at_level(logging.WARNING, "jaxinfer"):
        assert device_memory("gpu", 0.9) == module.DeviceMemory(total=80 * GIB, free=40 * GIB)
    assert "is 72.00 GiB, but JAX may use 40.00 GiB" in caplog.text


def test_nothing_is_set_once_a_backend_is_up(any_platform: Any) -> None:
    any_platform.setattr(xla_bridge, "backends_are_initialized", lambda: True)
    assert not claim_gpu_memory(0.9)
    assert jax.config.jax_pjrt_client_create_options is None


@pytest.mark.parametrize(
    ("platforms", "plugins", "expected"),
    [
        (None, ["xla_cuda12"], True),
        ("", ["xla_cuda13"], True),
        (None, [], False),
        (None, ["xla_cuda12", "libtpu"], False),  # a TPU's client refuses options that it does not know
        (None, ["xla_cuda12", "xla_other"], False),
        ("cpu", ["xla_cuda12"], False),
        ("cuda,cpu", [], True),
        ("gpu", [], True),
        ("tpu,cpu", ["xla_cuda12"], False),
    ],
)
def test_only_where_a_gpu_is_expected(
    monkeypatch: pytest.MonkeyPatch, platforms: str | None, plugins: list[str], expected: bool
) -> None:
    monkeypatch.setattr(module, "_installed_plugins", lambda: plugins)
    assert module._expects_gpu(platforms) is expected


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str, limit: int, in_use: int = 0) -> None:
    stats = {"bytes_limit": limit, "bytes_in_use": in_use}
    device = SimpleNamespace(device_kind=kind, memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])


def test_the_whole_device_is_known_from_the_option(fresh_gpu_process: Any, caplog: pytest.LogCaptureFixture) -> None:
    jax.config.update("jax_pjrt_client_create_options", {"memory_fraction": 0.9})
    pretend(fresh_gpu_process, "Some GPU", 72 * GIB)
    with caplog.at_level(logging.WARNING, "jaxinfer"):
        assert device_memory("gpu", 0.9) == module.DeviceMemory(total=80 * GIB, free=72 * GIB)
    assert not caplog.records


def test_a_backend_that_was_up_is_budgeted_from_its_limit_and_said(
    fresh_gpu_process: Any, caplog: pytest.LogCaptureFixture
) -> None:
    h200 = 143_155 << 20
    pretend(fresh_gpu_process, "NVIDIA H200", h200 * 3 // 4, in_use=10 * GIB)
    with caplog.at_level(logging.WARNING, "jaxinfer"):
        memory = device_memory("gpu", 0.5)
        assert not caplog.records  # half of it is there
        assert device_memory("gpu", 0.9) == memory
    assert memory == module.DeviceMemory(total=h200, free=h200 * 3 // 4 - 10 * GIB)
    (record,) = caplog.records
    text = record.getMessage()
    assert "gpu_memory_utilization=0.9 of NVIDIA H200 is 125.82 GiB" in text
    assert "may use 104.85 GiB" in text
    assert "jax.config.update('jax_pjrt_client_create_options', {'memory_fraction': 0.9})" in text


def test_an_unknown_device_counts_as_what_jax_may_use_of_it(fresh_gpu_process: Any) -> None:
    pretend(fresh_gpu_process, "Some GPU", 30 * GIB, in_use=GIB)
    assert device_memory("gpu", 0.9) == module.DeviceMemory(total=30 * GIB, free=29 * GIB)
    fresh_gpu_process.setattr(
        jax, "local_devices", lambda: [SimpleNamespace(device_kind="x", memory_stats=lambda: None)]
    )
    assert device_memory("gpu", 0.9) == module.DeviceMemory(0, 0)


def test_a_real_process_on_the_cpu_is_left_alone() -> None:
    program = (
        "import jax, jaxinfer, jaxinfer.startup.loading\n"
        "from jaxinfer.startup.device_memory import claim_gpu_memory\n"
        "assert jax.config.jax_pjrt_client_create_options is None\n"
        "assert not claim_gpu_memory(0.9)\n"
        "assert jax.config.jax_pjrt_client_create_options is None\n"
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
