"""Draft model: a small model of the same vocabulary guesses, token by token. HOST: plain integers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jaxinfer.cache.block_manager import PADDING_BLOCK
from jaxinfer.engine.draft import NO_DRAFT, Draft
from jaxinfer.engine.plan import DraftOutcome, ScheduledRow
from jaxinfer.engine.request import Request
from jaxinfer.sampling.draft_slots import draws_by_rejection
from jaxinfer.speculation.per_request import PerRequest


class DraftSteps(Protocol):
    """The device side of a draft model; see `jaxinfer.runner.draft_runner.DraftRunner`. A step's tokens are whatever
    `np.asarray` takes."""

    @property
    def num_compiled(self) -> int: ...

    def warm_up(self, progress: bool = False) -> None: ...

    def execute(self, rows: Sequence[ScheduledRow], lanes: Sequence[int], index: int) -> Any: ...

    def release(self) -> None: ...

    def restore(self) -> None: ...


@dataclass(slots=True)
class _Progress:
    """What of a request is in the draft's pool.

    Attributes:
        admission: to which admission of the request this belongs; -1 for none yet.
        num_computed: its first tokens whose keys and values are there.
        num_drafted: tokens of the latest draft whose are there behind them, if the draft is right.
        block_ids: blocks that they were written to.
        num_marked: its first blocks that are entered as full.
    """

    admission: int = -1
    num_computed: int = 0
    num_drafted: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_marked: int = 0


@dataclass(slots=True)
class _Lane:
    """A request that gets a draft now: of how many tokens, and what was drawn so far."""

    index: int
    request: Request
    count: int
    token_ids: list[int] = field(default_factory=list)


class DraftModelProposer:
    """Runs a draft model behind the target: first over the tokens that it has not seen, then k - 1 tokens further.

    The draft has a pool of its own in which a block has the number that it has in the target's. A block that the target
    finds in its prefix cache need not be computed by the draft either, if it is the draft that filled it with the same
    tokens. What the draft lacks of a prompt it computes in chunks of a step's budget, one each time it is asked, and
    until it has caught up it has no idea.

    Args:
        steps: the draft's device side.
        block_size: S.
        max_tokens: tokens of one of its steps, at most.
        max_position: positions that the draft model has; it guesses nothing beyond.
    """

    def __init__(self, steps: DraftSteps, block_size: int, max_tokens: int, max_position: int) -> None:
        self._steps = steps
        self._size = block_size
        self._max_tokens = max_tokens
        self._max_position = max_position
        self._progress = PerRequest(lambda request: _Progress())
        self._full: dict[int, bytes] = {}

    @property
    def num_compiled(self) -> int:
        """Programs of the draft model."""
        return self._steps.num_compiled

    def warm_up(self, progress: bool) -> None:
        """Compiles them."""
        self._steps.warm_up(progress)

    def propose(self, rows: Sequence[tuple[Request, int]]) -> list[Draft]:
        """See `Proposer`."""
        step, lanes = self._catch_up(rows)
        drawn: list[tuple[list[_Lane], Any]] = []
        index, going = 0, lanes
        while step:
            drawn.append((going, self._steps.execute(step, [lane.index for lane in going], index)))
            index += 1
            going = [lane for lane in going if lane.count > index]
            step = [_next_row(lane.request, index) for lane in going]
        for members, tokens in drawn:
            for lane, token in zip(members, np.asarray(tokens).tolist(), strict=False):
                lane.token_ids.append(token)
        drafts = [NO_DRAFT] * len(rows)
        for lane in lanes:
            self._progress[lane.request].num_drafted = lane.count - 1
            kept = lane.index if draws_by_rejection(lane.request) else -1
            drafts[lane.index] = Draft(tuple(lane.token_ids), kept)
        return drafts

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """What was right of a draft is computed."""
        for outcome in outcomes:
            progress = self._progress[outcome.request]
            progress.num_computed += min(outcome.num_accepted, progress.num_drafted)
            progress.num_drafted = 0

    def release(self) -> None:
        """Gives up the pool, and knows no tokens any more."""
        self._steps.release()
        self._progress.clear()
        self._full.clear()

    def restore(self) -> None:
        """Has an empty pool again."""
        self._steps.restore()

    def _catch_up(self, rows: Sequence[tuple[Request, int]]) -> tuple[list[ScheduledRow], list[_Lane]]:
        """The first step: of each request what the draft has not seen, as far as the step's tokens go; and those whose
        last token is among it, which get a draft."""
        step, lanes, left = [], [], self._max_tokens
        for index, (request, wanted) in enumerate(rows):
            known = request.num_known_tokens
            count = min(wanted, self._max_position - known + 1)
            progress = self._current(request)
            share = min(left, known - progress.num_computed)
            if count < 1 or share < 1:
                continue
            left -= share
            start, end = progress.num_computed, progress.num_computed + share
            is_last = end == known
            step.append(ScheduledRow(request, start, share, is_last))
            self._note_written(request, progress, start, end + (count - 1 if is_last else 0))
            progress.num_computed = end
            self._mark_full(request, progress)
            if is_last:
                lanes.append(_Lane(index, request, count))
        return step, lanes

    def _current(self, request: Request) -> _Progress:
        """What the draft's pool has of a request now: what it computed for it, as far as the request still has these
        blocks; for one that was admitted since, what it computed for others with the same tokens."""
        progress = self._progress[request]
        progress.num_drafted = 0
        table, keys = request.block_ids, request.block_keys
        if progress.admission != request.admission:
            progress.admission = request.admission
            full = 0
            while full < min(len(table), len(keys)) and self._full.get(table[full]) == keys[full]:
                full += 1
            progress.num_computed, progress.block_ids = full * self._size, table[:full]
            progress.num_marked = full
        for index, (block, own) in enumerate(zip(table, progress.block_ids, strict=False)):
            if block not in (own, PADDING_BLOCK):
                progress.num_computed = min(progress.num_computed, index * self._size)
                break
        progress.num_computed = min(progress.num_computed, request.num_known_tokens - 1)
        progress.num_marked = min(progress.num_marked, progress.num_computed // self._size)
        return progress

    def _note_written(self, request: Request, progress: _Progress, start: int, end: int) -> None:
        """Positions from `start` to before `end` are written: what their blocks held before is gone."""
        progress.block_ids = request.block_ids[: -(-end // self._size)]
        for block in progress.block_ids[start // self._size :]:
            self._full.pop(block, None)

    def _mark_full(self, request: Request, progress: _Progress) -> None:
        """Full blocks of known tokens can be told by their keys, if the target has made such."""
        full = min(progress.num_computed // self._size, len(request.block_keys))
        for index in range(progress.num_marked, full):
            self._full[request.block_ids[index]] = request.block_keys[index]
        progress.num_marked = max(progress.num_marked, full)


def _next_row(request: Request, index: int) -> ScheduledRow:
    """The row of the step that draws token `index` of a draft, from the one before, which only the device knows."""
    return ScheduledRow(request, request.num_known_tokens - 1 + index, 1, True, 0, True)
