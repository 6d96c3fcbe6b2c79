"""RestingWeights: a model's weights while an engine sleeps."""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from jaxinfer.typing import Params


class WeightsHolder(Protocol):
    """Has weights on the device."""

    def take_params(self) -> tuple[jax.Array, ...]:
        """The leaves, which it lets go of."""
        ...

    def update_params(self, params: Params) -> None:
        """Takes others of the same tree, shapes and dtypes."""
        ...


class RestingWeights:
    """Takes weights off the device and brings them back.

    Args:
        holder: has them.
        params_tree: their treedef.
        reload: reads them again; None when nobody could.
        source: gives those of another holder of the same, who has them again before this one: nothing else is kept or
            read then.
    """

    def __init__(
        self,
        holder: WeightsHolder,
        params_tree: Any,
        reload: Callable[[], Params] | None,
        source: Callable[[], Params] | None = None,
    ) -> None:
        self._holder = holder
        self._params_tree = params_tree
        self._reload = reload
        self._source = source
        self._is_resting = False
        self._host_leaves: list[_HostLeaf] | None = None

    @property
    def is_resting(self) -> bool:
        """They are not on the device."""
        return self._is_resting

    @property
    def is_lost(self) -> bool:
        """They rest, without a copy, and nobody could read them again."""
        return self._is_resting and not (self._host_leaves or self._reload or self._source)

    @property
    def can_reload(self) -> bool:
        """They could be read again."""
        return self._reload is not None

    def rest(self, keeps_copy: bool) -> None:
        """Frees their device memory; again while they rest, it may drop the copy.

        Args:
            keeps_copy: a copy stays in host memory.
        """
        keeps_copy = keeps_copy and self._source is None
        if not self._is_resting:
            leaves = self._holder.take_params()
            self._host_leaves = [_HostLeaf(leaf) for leaf in leaves] if keeps_copy else None
        elif not keeps_copy:
            self._host_leaves = None
        self._is_resting = True

    def wake(self) -> None:
        """Puts them back, from the copy or by reading them again; nothing if they are there."""
        if not self._is_resting:
            return
        if self._host_leaves is not None:
            params = jax.tree.unflatten(self._params_tree, [leaf.take() for leaf in self._host_leaves])
        else:
            read = self._source or self._reload
            assert read is not None
            params = read()
        self._holder.update_params(params)
        self._are_there()

    def replace(self, params: Params) -> None:
        """Has other weights from now on, which nobody could read again; also while the old ones rest."""
        self._holder.update_params(params)
        self._reload = None  # it would bring back the old ones
        self._are_there()

    def _are_there(self) -> None:
        self._host_leaves = None
        self._is_resting = False


class _HostLeaf:
    """A parameter in host memory, and whether the array it is a copy of still lives: then nothing has to be copied
    back, as for parameters that the caller holds as well."""

    def __init__(self, leaf: jax.Array) -> None:
        # Of an array that other processes have parts of, each keeps its own. Without the copy, numpy would keep the
        # array alive on the CPU.
        self._is_whole = leaf.is_fully_addressable
        parts = [leaf] if self._is_whole else [shard.data for shard in leaf.addressable_shards]
        self._values = [np.array(part, copy=True) for part in parts]
        self._original = weakref.ref(leaf)
        self._shape, self._sharding = leaf.shape, leaf.sharding
        self._devices = [shard.device for shard in leaf.addressable_shards]

    def take(self) -> jax.Array | np.ndarray:
        original = self._original()
        if original is not None and not original.is_deleted():
            return original
        if self._is_whole:
            return self._values[0]
        parts = list(map(jax.device_put, self._values, self._devices))
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, parts)
