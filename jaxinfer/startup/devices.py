"""The devices that an engine's replicas run on: the first ones of the process, or those of a caller's mesh."""

import logging
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinfer.sharding.placement import Placement, default_device

logger = logging.getLogger("jaxinfer")

AXIS = "model"
"""Name of the axis of a mesh that the engine makes itself."""


def placements(num_replicas: int, num_parts: int = 1) -> list[Placement]:
    """Where each replica lies: on JAX's default device the only one that is not split, else each on devices of its own,
    the first ones of this process. One that takes all devices of all processes of `jax.distributed` spans them.

    Args:
        num_replicas: `data_parallel_size`.
        num_parts: `tensor_parallel_size`, devices of each replica.

    Raises:
        ValueError: there are fewer devices.
    """
    needed = num_replicas * num_parts
    if needed == 1:
        return [Placement()]
    platform = default_device().platform
    devices = jax.local_devices(backend=platform)
    if needed > len(devices) and num_replicas == 1 and num_parts == len(jax.devices(platform)):
        devices = jax.devices(platform)
    if needed > len(devices):
        sizes = {"data_parallel_size": num_replicas, "tensor_parallel_size": num_parts}
        asked = [f"{name}={size}" for name, size in sizes.items() if size > 1]
        wanted = f"{asked[0]} needs as many devices" if len(asked) == 1 else f"{' with '.join(asked)} needs {needed}"
        advice = "use a smaller one"
        if platform == "cpu":
            advice += f", or make the CPU several devices: jax.config.update('jax_num_cpu_devices', {needed})"
            advice += " before anything uses JAX"
        if jax.process_count() > 1:
            advice += f", or tensor_parallel_size={len(jax.devices(platform))}, the devices of all processes"
        raise ValueError(f"{wanted}, and this process has {len(devices)} ({platform}); {advice}")
    return [_on(devices[first : first + num_parts]) for first in range(0, needed, num_parts)]


def mesh_placement(mesh: Mesh, axis_names: str | Sequence[str] | None, num_parts: int = 1) -> Placement:
    """A model on a mesh that the caller has.

    Args:
        mesh: any number of axes; the model is split over one, and lies whole along the others.
        axis_names: that one, by its name or in a sequence; None where only one of them splits anything.
        num_parts: `tensor_parallel_size`, 1 for what the mesh says.

    Raises:
        ValueError: there is no such axis, or it has another number of devices.
    """
    axis = _axis(mesh, axis_names)
    size = mesh.shape[axis]
    if num_parts not in (1, size):
        raise ValueError(
            f"tensor_parallel_size={num_parts} contradicts the mesh, whose axis {axis!r} has {size} devices; leave it "
            "out"
        )
    others = math.prod(mesh.axis_sizes) // size
    if others > 1:
        logger.info(
            "the model is split over the mesh's axis %r (%d devices); along the others it lies whole, and %d groups of "
            "devices compute the same",
            axis,
            size,
            others,
        )
    return Placement(mesh=mesh, axis=axis) if mesh.size > 1 else _on(list(mesh.devices.flat))


def _on(devices: Sequence[jax.Device]) -> Placement:
    """A model on these devices: whole on one, split over several."""
    if len(devices) > 1:
        return Placement(mesh=Mesh(np.array(devices), (AXIS,)), axis=AXIS)
    return Placement(device=devices[0])


def _axis(mesh: Mesh, axis_names: str | Sequence[str] | None) -> str:
    names = [str(name) for name in mesh.axis_names]
    if axis_names is not None:
        given = list(axis_names) if isinstance(axis_names, list | tuple) else [axis_names]
        if len(given) != 1 or given[0] not in names:
            raise ValueError(
                f"axis_names={axis_names!r} must name one axis of the mesh, the one that the model is split over: "
                f"{' or '.join(map(repr, names))}"
            )
        return given[0]
    splitting = [name for name in names if mesh.shape[name] > 1]
    if len(splitting) > 1:
        raise ValueError(
            f"axis_names=None: the mesh has several axes ({', '.join(names)}); name the one that the model is split "
            f"over, axis_names=({splitting[-1]!r},); along the others it lies whole"
        )
    return (splitting or names)[-1]
