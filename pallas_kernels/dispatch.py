"""Which implementation of an operation runs: by device, by what the kernel can do, and by its self-check on a GPU."""

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax

from pallas_kernels.self_check import SelfCheck, failure_of

IMPLEMENTATIONS = ("triton", "triton-interpret", "xla", "reference")
"""What ``implementation`` can be: the GPU kernel, the same kernel interpreted anywhere (slow, for tests), plain XLA,
and the specification (slow)."""

COMPUTE_CAPABILITIES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "A100": (8, 0),
        "A30": (8, 0),
        "A10": (8, 6),
        "A10G": (8, 6),
        "A40": (8, 6),
        "RTX A6000": (8, 6),
        "RTX 3090": (8, 6),
        "L4": (8, 9),
        "L40": (8, 9),
        "L40S": (8, 9),
        "RTX 4090": (8, 9),
        "H100": (9, 0),
        "H200": (9, 0),
        "GH200": (9, 0),
        "B200": (10, 0),
        "GB200": (10, 0),
        "RTX 5090": (12, 0),
    }
)
"""Of GPUs that are compiled for without being there; one that is there says it itself."""


@dataclass(frozen=True)
class Device:
    """What kernels are compiled for.

    Attributes:
        platform: "gpu", "cpu", ...
        kind: the model, as the driver names it.
        compute_capability: (major, minor) of an NVIDIA GPU; None for others and for unknown models that are not here.
        num_sms: streaming multiprocessors of a GPU, else 1.
        present: whether this process can run on it; False in a compilation for a GPU that is elsewhere.
    """

    platform: str
    kind: str
    compute_capability: tuple[int, int] | None
    num_sms: int
    present: bool = True


def current_device() -> Device:
    """The device that code traced now is compiled for.

    That is the abstract device of the current abstract mesh where it has one (`jax.sharding.use_abstract_mesh`), so
    that programs can be compiled for a GPU that is not here; otherwise JAX's default device.
    """
    real = _default_device()
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    # The mesh of devices that are here has an abstract device too, which mirrors them.
    if abstract is not None and abstract.device_kind != real.device_kind:
        capability = _named_capability(abstract.device_kind) if abstract.platform == "gpu" else None
        return Device(abstract.platform, abstract.device_kind, capability, abstract.num_cores or 1, present=False)
    capability = _parsed_capability(getattr(real, "compute_capability", None))
    return Device(real.platform, real.device_kind, capability, getattr(real, "core_count", None) or 1)


def choose(
    op: str,
    implementation: str | None = None,
    *,
    check: Callable[[Device], None] | None = None,
    self_check: SelfCheck | None = None,
    case: tuple[Hashable, ...] = (),
) -> str:
    """The implementation to run: the one asked for, else the best that works on the current device.

    On an NVIDIA GPU (Ampere or later) that is "triton" if `check` passes and, where the GPU is here, the kernel once
    gave the reference's numbers for this case; everywhere else it is "xla". What was asked for is not checked. Where
    arrays lie is not seen: on a machine with a GPU, code for the CPU asks for "xla" or runs under `jax.default_device`.

    Args:
        op: the operation's name, for messages.
        implementation: one of `IMPLEMENTATIONS`, or None.
        check: raises NotImplementedError where the kernel cannot do what is asked on the given device.
        self_check: a module-level function ``(implementation, *case) -> tree of arrays`` that runs the operation on
            tiny inputs it makes itself; its results must agree between "triton" and "reference". Done once in a process
            for each device and case, in the middle of a trace if need be; a kernel that fails is not used, and one
            warning says so.
        case: what distinguishes kernels of the operation that may differ in correctness: dtypes, formats, head dim.

    Returns:
        a name from `IMPLEMENTATIONS`.

    Raises:
        ValueError: an implementation that does not exist.
    """
    if implementation is not None:
        if implementation not in IMPLEMENTATIONS:
            allowed = ", ".join(IMPLEMENTATIONS)
            raise ValueError(f"implementation={implementation!r} of {op} must be one of {allowed}, or None to choose")
        return implementation
    device = current_device()
    if device.platform != "gpu" or device.compute_capability is None or device.compute_capability < (8, 0):
        return "xla"
    if check is not None:
        try:
            check(device)
        except NotImplementedError:
            return "xla"
    if device.present and self_check is not None and failure_of(op, self_check, case, _default_device()) is not None:
        return "xla"
    return "triton"


def _default_device() -> Any:
    config: Any = jax.config
    chosen = config.jax_default_device  # a device, a platform's name, or nothing
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return chosen or jax.local_devices()[0]


def _named_capability(kind: str) -> tuple[int, int] | None:
    """Of the longest known name in `kind` that stands alone there: "L4" is not in "NVIDIA L40S"."""
    for name in sorted(COMPUTE_CAPABILITIES, key=len, reverse=True):
        if re.search(rf"\b{name}\b", kind):
            return COMPUTE_CAPABILITIES[name]
    return None


def _parsed_capability(text: str | None) -> tuple[int, int] | None:
    """Of "8.9"; AMD's "gfx942" has none."""
    match = re.fullmatch(r"(\d+)\.(\d+)", text or "")
    return (int(match[1]), int(match[2])) if match else None
