"""Sleep: an engine gives its device memory back to the process, and takes it again."""

from collections.abc import Sequence

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.speculation.proposer import Proposer
from jaxinfer.startup.resting_weights import RestingWeights
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
        weights: the model's.
        proposer: may have a pool of its own, which goes with the KV cache; None for nobody.
        guessing: the proposer's weights, which go with the model's; None where it has none.
    """

    def __init__(
        self,
        engine: Engine,
        runner: ModelRunner,
        weights: RestingWeights,
        proposer: Proposer | None = None,
        guessing: RestingWeights | None = None,
    ) -> None:
        self._engine = engine
        self._runner = runner
        self._weights = weights
        self._proposer = proposer
        self._guessing = guessing
        self._missing: set[str] = set()

    @property
    def is_sleeping(self) -> bool:
        return bool(self._missing)

    def sleep(self, level: int) -> list[RequestOutput]:
        """Gives up KV cache and weights.

        Args:
            level: 1 keeps a copy of the weights in host memory, 2 keeps nothing but a copy of a proposer's that nobody
                could read again.

        Returns:
            Outputs that became due by the steps in flight.

        Raises:
            ValueError: another level.
            EngineDeadError: a step failed.
        """
        if isinstance(level, bool) or level not in (1, 2):
            raise ValueError(f"level={level!r} must be 1 (weights stay in host memory) or 2 (weights are dropped)")
        outputs = self.release_kv_cache()
        self._weights.rest(keeps_copy=level == 1)
        if self._guessing is not None:
            self._guessing.rest(keeps_copy=level == 1 or not self._guessing.can_reload)
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
            if self._weights.is_lost:
                raise ValueError(
                    "sleep(level=2) dropped the weights, and they are not those of a checkpoint that could be read "
                    "again: give them with update_params(...), or use sleep(level=1)"
                )
            self._weights.wake()
            self._has_weights()
        if KV_CACHE in wanted and KV_CACHE in self._missing:
            self._runner.restore_kv()
            if self._proposer is not None:
                self._proposer.restore()
            self._missing.discard(KV_CACHE)
        self._resume_if_complete()

    def update_params(self, params: Params) -> None:
        """Takes new parameters (checked by the caller), which also end the sleep of the weights."""
        self._weights.replace(params)
        self._has_weights()
        self._resume_if_complete()

    def _has_weights(self) -> None:
        if self._guessing is not None:
            self._guessing.wake()
        self._missing.discard(WEIGHTS)

    def _resume_if_complete(self) -> None:
        if not self._missing:
            self._engine.resume()
