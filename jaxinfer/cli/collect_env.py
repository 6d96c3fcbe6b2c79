"""`jaxinfer collect-env`: what a bug report should say about the machine."""

import argparse
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxinfer._version import __version__
from jaxinfer.cache_dir import default_cache_dir

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-triton", "tokenizers")
VARIABLES = (
    "JAXINFER_CACHE_DIR",
    "JAX_PLATFORMS",
    "XLA_FLAGS",
    "CUDA_VISIBLE_DEVICES",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)
"""The only environment variables that are shown; none of them is secret."""


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "collect-env",
        help="describe this machine for a bug report",
        description="Prints versions, devices and memory, for a bug report. Nothing secret is shown.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0."""
    facts = collect()
    if arguments.json:
        print(json.dumps(facts))
    else:
        print("\n".join(f"{name + ':':<16}{_shown(value)}" for name, value in facts.items()))
    return 0


def collect() -> dict[str, Any]:
    """The facts by name."""
    from jaxinfer.planning.host_memory import host_memory

    memory = host_memory()
    return {
        "jaxinfer": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        **{name: version for name in PACKAGES if (version := _version(name)) is not None},
        "devices": _devices(),
        "os": platform.platform(),
        "cpu": f"{_cpu_model()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores usable",
        "memory": f"{memory.total_bytes / 2**30:.1f} GiB, {memory.available_bytes / 2**30:.1f} GiB available",
        "cache": str(default_cache_dir()),
        **{name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    """One text a device, or the reason why JAX finds none."""
    try:
        import jax

        return [f"{device.id}: {device.platform} {device.device_kind}{_memory(device)}" for device in jax.devices()]
    except Exception as error:  # a broken installation is what this command is for
        return [f"none: {type(error).__name__}: {error}"]


def _memory(device: Any) -> str:
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return "" if limit is None else f", {limit / 2**30:.1f} GiB for JAX"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _shown(value: Any) -> str:
    return "; ".join(value) if isinstance(value, list) else str(value)
