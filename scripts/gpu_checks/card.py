"""Stage `card`: what the numbers were measured on."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import jax

from scripts.gpu_checks.case import Case, Compiled, NotHere
from scripts.gpu_checks.session import Session

QUERY = "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"


def cases(session: Session) -> list[Case]:
    """JAX's view, the driver's, and PyTorch's."""
    return [Case("card", "jax", _jax), Case("card", "nvidia-smi", _driver), Case("card", "torch", _torch)]


def _jax(session: Session, programs: Sequence[Compiled]) -> dict[str, Any]:
    device = jax.local_devices()[0]
    names = ("jax", "jaxlib", "flax", "jax-cuda12-plugin", "jax-cuda13-plugin", "triton", "numpy", "nvidia-cudnn-cu13")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": device.device_kind,
        "compute_capability": str(getattr(device, "compute_capability", "none")),
        "num_sms": getattr(device, "core_count", 0),
        "platform_version": " ".join(device.client.platform_version.split()),
        "memory_gib": round(session.memory_bytes / 2**30, 1),
        "python": platform.python_version(),
        "versions": {name: version for name in names if (version := _version(name))},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver(session: Session, programs: Sequence[Compiled]) -> dict[str, Any]:
    if not shutil.which("nvidia-smi"):
        raise NotHere("no nvidia-smi on the PATH")
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise NotHere(f"nvidia-smi returned {done.returncode}: {(done.stdout + done.stderr).strip()}")
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
    return {"driver": dict(zip(QUERY.split(","), values, strict=True))}


def _torch(session: Session, programs: Sequence[Compiled]) -> dict[str, Any]:
    return session.torch.ask("facts")
