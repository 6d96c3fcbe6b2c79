"""Replicas: several engines behind the interface of one. Host only."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from jaxinfer.cache.prefix_cache import block_keys, root_of
from jaxinfer.config import EngineConfig
from jaxinfer.engine.beam_search_params import BeamSearchParams
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.request import Scoring
from jaxinfer.engine.router import OUTPUT_GUESS, Router, Work
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.engine.stats import EngineStats, sum_of_stats

logger = logging.getLogger("jaxinfer")

POLL_SECONDS = 50e-6
"""How long the host sleeps when no replica's step has ended, before it looks again."""


class Replicas:
    """Data parallelism: engines of the same model on devices of their own, each with a pool, a scheduler and a prefix
    cache of its own, behind one queue. Methods are those of `Engine`, with what is said here; not thread-safe.

    `step` hands every device its next step before it waits, and completes the steps of all devices that have ended
    theirs, so that none waits for a slower one. All host work is done in the calling thread. A request stays on the
    replica it came to, and its output does not depend on which one that is.

    When a step of one replica fails, its requests end with the error and it gets no more; the others go on. Only with
    the last one everything is dead.

    Args:
        engines: two or more with the same settings, which share their `seeds`. Nobody else steps them.
        sleep: waits for so many seconds.
    """

    def __init__(self, engines: Sequence[Engine], sleep: Callable[[float], None] = time.sleep) -> None:
        self.engines = tuple(engines)
        self._sleep = sleep
        self._lost: set[Engine] = set()
        caches = [engine.scheduler.block_manager.cache for engine in self.engines]
        self._router = Router(caches, self.config.cache.block_size)

    @property
    def config(self) -> EngineConfig:
        """Of each replica."""
        return self.engines[0].config

    @property
    def max_num_seqs(self) -> int:
        return sum(engine.max_num_seqs for engine in self.engines)

    @property
    def weight_version(self) -> int:
        return self.engines[0].weight_version

    @property
    def num_unfinished_requests(self) -> int:
        return sum(engine.num_unfinished_requests for engine in self.engines)

    def has_unfinished_requests(self) -> bool:
        return self.num_unfinished_requests > 0

    @property
    def is_dead(self) -> bool:
        """No replica lives."""
        return all(engine.is_dead for engine in self.engines)

    def check_alive(self) -> None:
        """Raises EngineDeadError when no replica lives."""
        if self.is_dead:
            self.engines[0].check_alive()

    @property
    def is_suspended(self) -> bool:
        return any(engine.is_suspended for engine in self.engines)

    @property
    def can_step(self) -> bool:
        return any(engine.can_step for engine in self._living)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | BeamSearchParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
        scoring: Scoring | None = None,
    ) -> None:
        """Queues a request on the replica that `Router` chooses."""
        self.check_alive()
        if self._router.replica_of(request_id) is not None:
            raise ValueError(f"request_id={request_id!r} is in use by an unfinished request; choose another")
        work = self._work(prompt_token_ids, params, cache_salt)
        chosen = self._router.choose(work, [self.engines.index(engine) for engine in self._living])
        self.engines[chosen].add_request(
            request_id,
            prompt_token_ids,
            params,
            prompt=prompt,
            priority=priority,
            arrival_time=arrival_time,
            cache_salt=cache_salt,
            scoring=scoring,
        )
        self._router.begin(request_id, work, chosen)

    def fork(self, request_id: str, new_request_id: str, params: SamplingParams, *, index: int = 0) -> None:
        """Queues the fork on its source's replica, whose keys and values it shares."""
        self.check_alive()
        if self._router.replica_of(new_request_id) is not None:
            raise ValueError(f"request_id={new_request_id!r} is in use by an unfinished request; choose another")
        chosen = self._router.replica_of(request_id) or 0
        self.engines[chosen].fork(request_id, new_request_id, params, index=index)
        self._router.begin(new_request_id, Work(1, _num_output_tokens(params)), chosen)

    def abort(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        outputs: list[RequestOutput] = []
        for place, engine in enumerate(self.engines):
            outputs += engine.abort([each for each in ids if self._router.replica_of(each) == place])
        return self._noted(outputs)

    def abort_all(self) -> list[RequestOutput]:
        return self._noted([output for engine in self.engines for output in engine.abort_all()])

    def params_changed(self) -> None:
        for engine in self.engines:
            engine.params_changed()
        self._router.forget_prefixes()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Empties the prefix caches of the replicas that can do without now; returns whether all could."""
        done = [engine.reset_prefix_cache(reset_running_requests) for engine in self._living]
        return all(done)

    def suspend(self) -> list[RequestOutput]:
        self.check_alive()
        return self._noted([output for engine in self._living for output in engine.suspend()])

    def resume(self) -> None:
        for engine in self.engines:
            engine.resume()

    def step(self) -> list[RequestOutput]:
        """Completes a step of each device that has ended one, of at least one; returns and raises as `Engine.step`."""
        self.check_alive()
        outputs: list[RequestOutput] = []
        while True:
            working = [engine for engine in self._living if engine.can_step]
            for engine in working:
                outputs += engine.dispatch()
            ended = working if len(working) == 1 else [engine for engine in working if engine.is_ready]
            for engine in ended:
                if not engine.is_dead:
                    outputs += engine.step()
            if not working:
                return self._living[0].step()  # which says what is wrong, if anything is
            if ended or outputs:
                return self._noted(outputs)
            self._sleep(POLL_SECONDS)

    def stats(self) -> EngineStats:
        """The sums over all replicas, and each one's in `replicas`; see `sum_of_stats`."""
        return sum_of_stats([engine.stats() for engine in self.engines])

    @property
    def _living(self) -> list[Engine]:
        return [engine for engine in self.engines if not engine.is_dead]

    def _work(
        self, prompt_token_ids: Sequence[int], params: SamplingParams | BeamSearchParams, cache_salt: str | None
    ) -> Work:
        """What a request takes; nothing where it is one that the engine will refuse."""
        try:
            ids, output = list(prompt_token_ids), _num_output_tokens(params)
            keys = block_keys(ids, self.config.cache.block_size, root_of(cache_salt)) if self._shares(params) else []
        except (AttributeError, OverflowError, TypeError, ValueError):
            return Work(1, 0)
        return Work(max(1, len(ids)), output, keys)

    def _shares(self, params: SamplingParams | BeamSearchParams) -> bool:
        """The request takes blocks from the prefix cache, and others find its own there."""
        reads = isinstance(params, BeamSearchParams) or params.reads_cache
        return self.config.cache.enable_prefix_caching and reads

    def _noted(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        for output in outputs:
            if output.finished:
                self._router.end(output.request_id)
        for engine in self.engines:
            if engine.is_dead and engine not in self._lost:
                self._lost.add(engine)
                logger.error(
                    "replica %d of %d is dead; its requests have ended with an error and the other replicas go on",
                    self.engines.index(engine),
                    len(self.engines),
                )
        return outputs


def _num_output_tokens(params: SamplingParams | BeamSearchParams) -> int:
    """What a request is expected to generate."""
    samples = params.beam_width if isinstance(params, BeamSearchParams) else params.n
    return samples * min(OUTPUT_GUESS, params.max_tokens or OUTPUT_GUESS)


AnyEngine: TypeAlias = Engine | Replicas
"""What a front door serves requests with."""


def num_lost(engine: AnyEngine) -> int:
    """Replicas that are dead; an engine that is alone is one."""
    return sum(each.is_dead for each in (engine.engines if isinstance(engine, Replicas) else [engine]))
