"""The memory of the device that runs the model: JAX's share of it, settled before JAX starts where that can be."""

import importlib
import importlib.util
import logging
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import jax

from jaxinfer.planning.gpu_specs import GPU_SPECS
from jaxinfer.planning.host_memory import host_memory

logger = logging.getLogger("jaxinfer")

LARGEST_FRACTION = 0.95
"""What JAX can take of a GPU at most: CUDA's own context has to lie beside it, and where the whole does not fit JAX
takes a tenth less than it could."""
_OPTIONS = "jax_pjrt_client_create_options"
_FRACTION = "memory_fraction"
_GPU_PLATFORMS = {"cuda", "gpu", "rocm"}
_GPU_PLUGINS = ("xla_cuda", "xla_rocm")


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of the device that runs the model, before this engine has put anything there.

    Attributes:
        total: all of it, whatever JAX may use.
        free: what JAX may use and does not.
    """

    total: int
    free: int


def claim_gpu_memory(utilization: float) -> bool:
    """Has JAX take the share `utilization` of each GPU instead of 75 %, when no backend has been started yet.

    JAX reads this once, when it starts its client for the GPU, so that afterwards nothing is changed; nor is it when
    the user has said what JAX may take (a memory_fraction in `jax.config.jax_pjrt_client_create_options`, or JAX's
    environment variable XLA_CLIENT_MEM_FRACTION), or when no GPU plugin is installed. Other entries of the option
    stay. It is the process's: whoever wants to do more in the process than run this engine starts JAX first, or sets
    the option.

    Args:
        utilization: `gpu_memory_utilization`, above 0 and at most 1.

    Returns:
        Whether the option was set.
    """
    from jax._src import xla_bridge  # nothing public tells without starting one

    if xla_bridge.backends_are_initialized() or not _expects_gpu(jax.config.jax_platforms):  # type: ignore[attr-defined]
        return False
    options = _as_mapping(jax.config.jax_pjrt_client_create_options)  # type: ignore[attr-defined]
    if _users_fraction() is not None:
        return False
    fraction = min(float(utilization), LARGEST_FRACTION)
    jax.config.update(_OPTIONS, {**options, _FRACTION: fraction})
    logger.info("JAX may use %.0f%% of each GPU in this process (gpu_memory_utilization)", 100 * fraction)
    return True


def device_memory(platform: str, utilization: float, num_devices: int = 1) -> DeviceMemory:
    """Memory of a device; of the CPU its share of the machine's. Zero where the device does not tell.

    Says so in the log when JAX may use less of a GPU than `utilization` of the whole.

    Args:
        platform: of the default backend, as `jax.default_backend()` names it.
        utilization: `gpu_memory_utilization`.
        num_devices: how many are used.
    """
    if platform == "cpu":
        host = host_memory()
        return DeviceMemory(host.total_bytes // num_devices, host.available_bytes // num_devices)
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit", 0)
    memory = DeviceMemory(
        total=max(limit, _whole(limit, _users_fraction(), device.device_kind)),
        free=limit - stats.get("bytes_in_use", 0),
    )
    wanted = min(utilization, LARGEST_FRACTION) * memory.total
    if limit and limit < 0.995 * wanted:
        logger.warning(
            "gpu_memory_utilization=%g of %s is %.2f GiB, but JAX may use %.2f GiB, as it was started or told before "
            "this engine: the engine makes do with that. Make the engine before anything uses JAX, or start the "
            "process with jax.config.update(%r, {%r: %g})",
            utilization,
            device.device_kind,
            wanted / 2**30,
            limit / 2**30,
            _OPTIONS,
            _FRACTION,
            min(utilization, LARGEST_FRACTION),
        )
    return memory


def _users_fraction() -> Any:
    """The memory_fraction that is set for JAX's GPU client, None when nobody has set one. The plugin turns JAX's
    environment variables into options; those of jax.config come over them."""
    from jax._src.lib import xla_client

    by_plugin = dict(xla_client.generate_pjrt_gpu_plugin_options())
    options = _as_mapping(jax.config.jax_pjrt_client_create_options)  # type: ignore[attr-defined]
    return options.get(_FRACTION, by_plugin.get(_FRACTION))


def _whole(limit: int, fraction: Any, kind: str) -> int:
    """Bytes of the GPU of which JAX may use `limit`: by the option that set it, else by the card's name; 0 where
    neither tells. A fraction that is no number comes from the command line form of the option."""
    known = [spec.memory_bytes for spec in GPU_SPECS.values() if spec.device_name == kind]
    if isinstance(fraction, int | float) and 0 < fraction <= 1:
        return round(limit / fraction)
    return known[0] if known else 0


def _as_mapping(options: Any) -> Mapping[str, Any]:
    """JAX's client options, which it takes as a dict or as "key:value;key:value"."""
    if isinstance(options, str):
        return dict(entry.split(":", 1) for entry in options.split(";") if ":" in entry)
    return options or {}


def _expects_gpu(platforms: str | None) -> bool:
    """Whether JAX will start a client for GPUs, and for nothing else that takes options, if it finds the device.

    Args:
        platforms: jax_platforms, None or "" where JAX may choose among all that are installed.
    """
    if platforms:
        return {name.strip() for name in platforms.split(",")} - {"cpu"} <= _GPU_PLATFORMS and platforms != "cpu"
    plugins = _installed_plugins()
    return bool(plugins) and all(name.startswith(_GPU_PLUGINS) for name in plugins)


def _installed_plugins() -> list[str]:
    """JAX's plugins by their modules' own names, and libtpu, which JAX knows without one."""
    names = [entry.value.rpartition(".")[2] for entry in entry_points(group="jax_plugins")]
    if importlib.util.find_spec("libtpu") is not None:
        names.append("libtpu")
    if importlib.util.find_spec("jax_plugins") is not None:
        names += [module.name for module in pkgutil.iter_modules(importlib.import_module("jax_plugins").__path__)]
    return names
