"""Placement: the device, or the devices of a mesh, that an engine's arrays lie on and its programs run on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

WHOLE = PartitionSpec()
"""Of an array that lies whole on every device."""


@dataclass(frozen=True)
class Placement:
    """One device, or a mesh; neither is JAX's default device, without a word about it in any program.

    Attributes:
        device: the one device.
        mesh: programs run on all of its devices as one, under `jax.shard_map`. Its devices are of one kind.
        axis: the mesh axis over which the model is split; arrays lie whole along the other axes.
    """

    device: jax.Device | None = None
    mesh: Mesh | None = None
    axis: str = ""

    def __post_init__(self) -> None:
        if self.device is not None and self.mesh is not None:
            raise ValueError("device and mesh: give only one of them")
        if self.mesh is not None and self.axis not in self.mesh.axis_names:
            raise ValueError(f"axis={self.axis!r} is none of the mesh's axes: {', '.join(self.mesh.axis_names)}")
        if self.mesh is not None:  # a caller's axes may be of the kind that operations outside `program` refuse
            object.__setattr__(self, "mesh", automatic(self.mesh))

    @property
    def num_parts(self) -> int:
        """Devices that the model is split over."""
        return 1 if self.mesh is None else int(self.mesh.shape[self.axis])

    @property
    def num_devices(self) -> int:
        """All devices, those along other axes of the mesh as well."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def spans_processes(self) -> bool:
        """Other processes of `jax.distributed` have some of the devices: all run the same programs in one order."""
        return self.mesh is not None and self.mesh.is_multi_process

    def sharding(self, spec: PartitionSpec = WHOLE) -> Sharding | None:
        """How an array lies that is split by `spec`; None for JAX's default device."""
        if self.mesh is not None:
            return NamedSharding(self.mesh, spec)
        return None if self.device is None else SingleDeviceSharding(self.device)

    def put(self, tree: Any, spec: PartitionSpec = WHOLE) -> Any:
        """A tree of arrays where they belong; those that are there already stay the same arrays.

        Args:
            tree: of JAX arrays or NumPy arrays; where other processes have some of the devices, the same in each.
            spec: how each is split.
        """
        target = self.sharding(spec)
        return jax.tree.map(lambda leaf: put_array(leaf, target), tree)

    def shape(self, leaf: Any, spec: PartitionSpec = WHOLE) -> jax.ShapeDtypeStruct:
        """What a program is told of an array that lies so."""
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.sharding(spec))

    def program(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """A function as it is jitted: on a mesh every device runs it on its parts of the arguments.

        Args:
            function: of positional arguments.
            in_specs, out_specs: of `jax.shard_map`; of no meaning without a mesh.
        """
        if self.mesh is None:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def put_array(leaf: Any, target: Sharding | None) -> jax.Array:
    """An array laid out so (None: on JAX's default device); the same array where it is already."""
    if isinstance(leaf, jax.Array):
        target = target or SingleDeviceSharding(default_device())
        if leaf.sharding == target or leaf.sharding.is_equivalent_to(target, leaf.ndim):
            return leaf
    if target is not None and not target.is_fully_addressable:
        # Each process gives its devices their parts of what all have; device_put would compare it between them.
        values = np.asarray(leaf)
        return jax.make_array_from_callback(values.shape, target, lambda index: values[index])
    array: jax.Array = jax.device_put(leaf, target)
    return array


def automatic(mesh: Mesh) -> Mesh:
    """The same mesh with axes over which XLA, not the types of arrays, says how operations are split."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def default_device() -> jax.Device:
    """The device that JAX puts arrays on when it is told nothing."""
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return chosen or jax.local_devices()[0]
