"""Drafts: asks for guesses before a step, and tells everybody what became of them after it."""

import copy
from collections.abc import Callable

from jaxinfer.engine.output_processor import OutputProcessor
from jaxinfer.engine.plan import Runner, Speculation
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.speculation_stats import SpeculationStats


class Drafts:
    """The engine's part of speculation.

    Args:
        speculation: who guesses; None for nobody.
        scheduler: says for whom, and takes the drafts.
        outputs: show each request what was guessed for it.
        runner: brings the pool up to date, since methods may read it.
        clock: seconds.
    """

    def __init__(
        self,
        speculation: Speculation | None,
        scheduler: Scheduler,
        outputs: OutputProcessor,
        runner: Runner,
        clock: Callable[[], float],
    ) -> None:
        self._speculation = speculation
        self._scheduler = scheduler
        self._outputs = outputs
        self._runner = runner
        self._clock = clock
        self._last_seconds = 0.0
        self._stats = SpeculationStats() if speculation is not None else None

    @property
    def num_compiled(self) -> int:
        """Programs of whoever guesses."""
        return 0 if self._speculation is None else self._speculation.num_compiled

    @property
    def stats(self) -> SpeculationStats | None:
        """Everything so far; None for nobody."""
        return copy.deepcopy(self._stats)

    def make(self) -> None:
        """Gives running requests drafts, where that is worth while; to be called when no step is in flight."""
        if self._speculation is None:
            return
        room = self._scheduler.draft_room
        rows = room.candidates(self._speculation.length)
        if not rows:
            return
        began = self._clock()
        copies, moves = room.take_changes()
        if copies or moves:
            self._runner.change(copies, moves)
        drafts = self._speculation.propose(rows)
        self._last_seconds = self._clock() - began
        for (request, _), draft in zip(rows, drafts, strict=True):
            room.put(request, draft)

    def learn(self, device_seconds: float) -> None:
        """A step that took so long was committed."""
        outcomes = self._scheduler.draft_room.take_outcomes()
        if self._speculation is None or self._stats is None:
            return
        self._stats.draft_seconds += self._last_seconds
        if outcomes:
            self._stats.num_verify_steps += 1
            self._stats.verify_seconds += device_seconds
            for outcome in outcomes:
                self._stats.add(outcome.num_accepted, outcome.num_drafted, outcome.draft.depth)
                self._outputs.guessed(outcome, self._last_seconds, device_seconds)
            self._speculation.observe(outcomes)
        self._last_seconds = 0.0
