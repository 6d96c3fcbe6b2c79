"""Sleep: an engine gives its device memory back to the process, and takes it again."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.speculation.proposer import Proposer
from jaxinfer.typing import Params

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)


class Sleep:
    """What an engine has given up for now: nothing, its KV cache, its weights, or both. To be used between two steps.

    The steps in flight are completed and running requests lose their blocks; they go on after waking, with the same
    tokens as if nothing had happened. While anything is missing the engine takes and computes nothing.

    Args:
        engine: serves requests.
        runner: its device side.
        params_tree: treedef of the parameters.
        reload: reads the weights again as they are now; None when nobody could.
        proposer: may have a pool of its own, which goes with the KV cache. Its weights stay.
    """

    def __init__(
        self,
        engine: Engine,
        runner: ModelRunner,
        params_tree: Any,
        reload: Callable[[], Params] | None,
        proposer: Proposer | None = None,
    ) -> None:
        self._engine = engine
        self._runner = runner
        self._params_tree = params_tree
        self._reload = reload
        self._proposer = proposer
        self._missing: set[str] = set()
        self._host_leaves: list[_HostLeaf] | None = None

    @property
    def is_sleeping(self) -> bool:
        return bool(self._missing)

    def sleep(self, level: int) -> list[RequestOutput]:
        """Gives up KV cache and weights.

        Args:
            level: 1 keeps a copy of the weights in host memory, 2 keeps nothing.

        Returns:
            Outputs that became due by the steps in flight.

        Raises:
            ValueError: another level.
            EngineDeadError: a step failed.
        """
        if isinstance(level, bool) or level not in (1, 2):
            raise ValueError(f"level={level!r} must be 1 (weights stay in host memory) or 2 (weights are dropped)")
        outputs = self.release_kv_cache()
        if level == 2:
            self._runner.take_params()
            self._host_leaves = None
        elif WEIGHTS not in self._missing:
            self._host_leaves = [_HostLeaf(leaf) for leaf in self._runner.take_params()]
        self._missing.add(WEIGHTS)
        return outputs

    def release_kv_cache(self) -> list[RequestOutput]:
        """Gives up the KV cache alone; returns and raises as `sleep`."""
        outputs = self._engine.suspend()
        if KV_CACHE not in self._missing:
            self._runner.release_kv()
            if self._proposer is not None:
                self._proposer.release()
            self._missing.add(KV_CACHE)
        return outputs

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Takes back what `tags` name of what is missing, weights first; once all is there the engine goes on.

        Args:
            tags: of "weights" and "kv_cache"; None for both.

        Raises:
            ValueError: an unknown tag; the weights were dropped and there is nowhere to read them from; or the device
                has no room. What was there before stays.
        """
        wanted = TAGS if tags is None else tuple(tags)
        if isinstance(tags, str) or not set(wanted) <= set(TAGS):
            raise ValueError(f"tags={tags!r} must be a list of 'weights' and 'kv_cache', or None for both")
        if WEIGHTS in wanted and WEIGHTS in self._missing:
            self._runner.update_params(self._weights())
            self._has_weights()
        if KV_CACHE in wanted and KV_CACHE in self._missing:
            self._runner.restore_kv()
            if self._proposer is not None:
                self._proposer.restore()
            self._missing.discard(KV_CACHE)
        self._resume_if_complete()

    def update_params(self, params: Params) -> None:
        """Takes new parameters (checked by the caller), which also end the sleep of the weights."""
        self._runner.update_params(params)
        self._reload = None  # it would bring back the old ones
        self._has_weights()
        self._resume_if_complete()

    def _weights(self) -> Params:
        if self._host_leaves is not None:
            return jax.tree.unflatten(self._params_tree, [leaf.take() for leaf in self._host_leaves])
        if self._reload is None:
            raise ValueError(
                "sleep(level=2) dropped the weights, and they are not those of a checkpoint that could be read again: "
                "give them with update_params(...), or use sleep(level=1)"
            )
        return self._reload()

    def _has_weights(self) -> None:
        self._host_leaves = None
        self._missing.discard(WEIGHTS)

    def _resume_if_complete(self) -> None:
        if not self._missing:
            self._engine.resume()


class _HostLeaf:
    """A parameter in host memory, and whether the array it is a copy of still lives: then nothing has to be copied
    back, as for parameters that the caller holds as well."""

    def __init__(self, leaf: jax.Array) -> None:
        self._values = np.array(leaf, copy=True)  # without the copy, numpy would keep the array alive on the CPU
        self._original = weakref.ref(leaf)

    def take(self) -> jax.Array | np.ndarray:
        original = self._original()
        return self._values if original is None or original.is_deleted() else original
