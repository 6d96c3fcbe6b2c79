"""Replica: an engine with its device side; a front door has one, or under data parallelism several."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.replicas import AnyEngine, Replicas
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.speculation.speculator import Speculator
from jaxinfer.startup.sleep import Sleep
from jaxinfer.typing import Params


@dataclass(frozen=True)
class Replica:
    """An engine and what it has on its device.

    Attributes:
        engine: serves requests.
        runner: the engine's device side.
        sleep: its device memory, given up and taken back.
        speculator: guesses tokens ahead; None for nobody.
    """

    engine: Engine
    runner: ModelRunner
    sleep: Sleep
    speculator: Speculator | None

    def close(self) -> None:
        """Frees the device memory that is the engine's own."""
        self.runner.shutdown()
        if self.speculator is not None:
            self.speculator.proposer.release()


class SleepTogether:
    """`Sleep` of several replicas, which have the same weights.

    Args:
        replicas: those after the first get their weights from it when they wake.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    @property
    def is_sleeping(self) -> bool:
        return any(each.is_sleeping for each in self._sleeps)

    @property
    def _living(self) -> list[Replica]:
        return [replica for replica in self._replicas if not replica.engine.is_dead]

    @property
    def _sleeps(self) -> list[Sleep]:
        return [replica.sleep for replica in self._living]

    def sleep(self, level: int) -> list[RequestOutput]:
        return [output for each in self._sleeps for output in each.sleep(level)]

    def release_kv_cache(self) -> list[RequestOutput]:
        return [output for each in self._sleeps for output in each.release_kv_cache()]

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """As `Sleep.wake_up`; where a device has no room, what other replicas have taken back stays."""
        for each in self._sleeps:
            each.wake_up(tags)

    def update_params(self, params: Params) -> None:
        """As `Sleep.update_params`; only once the parameters are on all devices does any replica take them. The first
        one gets them even when it is dead: the others wake with what it has."""
        chosen = [replica for replica in self._replicas if replica is self._replicas[0] or not replica.engine.is_dead]
        placed = [replica.runner.placed(params) for replica in chosen]
        for replica, own in zip(chosen, placed, strict=True):
            replica.sleep.update_params(own)


AnySleep: TypeAlias = Sleep | SleepTogether


def serving_together(replicas: Sequence[Replica]) -> tuple[AnyEngine, AnySleep]:
    """What serves requests, and what gives its device memory up."""
    if len(replicas) == 1:
        return replicas[0].engine, replicas[0].sleep
    engines = [replica.engine for replica in replicas]
    return Replicas(engines), SleepTogether(replicas)
