"""Draft room: who may guess tokens in the next step, where these are put, and what is given back afterwards."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxinfer.cache.block_manager import BlockManager
from jaxinfer.config import SchedulerConfig, SpeculationConfig
from jaxinfer.engine.draft import NO_DRAFT, Draft
from jaxinfer.engine.plan import DraftOutcome, RowResult, ScheduledRow, StepPlan
from jaxinfer.engine.request import Request, RequestStatus
from jaxinfer.engine.running_set import RunningSet


class DraftRoom:
    """The scheduler's part of speculation. Nobody loses a block, a token of the step or a place in it for a draft.

    A step with drafts is synchronous: how many tokens a request has afterwards, the host has to see first. So is every
    step while requests may guess, since a guess begins from a known token.

    The tokens of a tree lie in the pool in the order of their indices. Of the path that holds they are moved to where
    plain decoding would have put them (`StepPlan.moves`) before the next step writes or copies anything: until then
    nobody reads them, and blocks that are given back or made public with the step are as they should be by the time
    that others get them.

    Args:
        manager: the pool.
        running: who has a slot.
        config: the step's limits.
        speculation: how far ahead, and for how many requests; None for no drafts at all.
    """

    def __init__(
        self, manager: BlockManager, running: RunningSet, config: SchedulerConfig, speculation: SpeculationConfig | None
    ) -> None:
        self._manager = manager
        self._running = running
        self._config = config
        self._speculation = speculation
        self._verifying: StepPlan | None = None
        self._outcomes: list[DraftOutcome] = []
        self._moves: list[tuple[int, int]] = []
        self._num_slots = manager.blocks_for(config.max_model_len) * manager.block_size

    @property
    def must_sync(self) -> bool:
        """Drafts are being verified, or may be made."""
        return self._verifying is not None or self._is_active

    @property
    def _is_active(self) -> bool:
        return self._speculation is not None and 0 < len(self._running) <= self._speculation.max_running

    def candidates(self, length: Callable[[Request], int]) -> list[tuple[Request, int]]:
        """Requests that lack one token and how many more may be guessed for each; they get blocks for these.

        Args:
            length: how many a request would like, at least 1.
        """
        if self._speculation is None or not self._is_active or self._verifying is not None:
            return []
        found = []
        budget = self._config.max_num_batched_tokens - len(self._running)
        spare = self._manager.num_free_blocks - len(self._running)  # each may need one for its next token
        for request in self._running:
            count = min(length(request), budget, self._num_useful(request))
            if count < 1 or not _is_decoding(request):
                continue
            before = self._manager.num_free_blocks
            count = min(count, self._room(request, spare))
            if count < 1:
                continue
            end = request.num_known_tokens + count
            if not self._manager.allocate_writable(request, request.num_computed_tokens, end):
                raise RuntimeError(f"request {request.request_id!r} got no blocks for a draft although some are free")
            spare -= before - self._manager.num_free_blocks
            budget -= count
            found.append((request, count))
        return found

    def _num_useful(self, request: Request) -> int:
        """Tokens that may be drawn for it after the next one; where drafts are trees, of which one path holds at most,
        what its block table has entries for."""
        useful = request.max_total_tokens - request.num_known_tokens - 1
        is_tree = self._speculation is not None and self._speculation.tree_depth > 0
        return self._num_slots - request.num_known_tokens if is_tree and useful > 0 else useful

    def _room(self, request: Request, spare: int) -> int:
        """Tokens that fit behind the known ones, in the request's blocks and `spare` more."""
        blocks = len(request.block_ids) + max(0, spare)
        if self._manager.shares_block(request, request.num_computed_tokens):
            blocks -= 1
        return blocks * self._manager.block_size - request.num_known_tokens

    def put(self, request: Request, draft: Draft) -> None:
        """Takes the draft of a candidate; blocks that it does not need are given back.

        Raises:
            ValueError: it is no tree, or one where drafts are chains, or deeper than they may be.
        """
        draft.check()
        deepest = self._speculation.tree_depth if self._speculation is not None else 0
        if draft.parents and draft.depth > deepest:
            raise ValueError(f"a draft is a tree of depth {draft.depth}; SpeculationConfig.tree_depth is {deepest}")
        request.draft = draft
        self._trim(request, request.num_known_tokens + len(draft.token_ids))

    def scheduled(self, plan: StepPlan) -> StepPlan:
        """Takes note of a new plan and returns it."""
        if self._speculation is not None and plan.has_drafts:
            self._verifying = plan
        return plan

    def note_committed(self, plan: StepPlan) -> None:
        """The oldest step is done."""
        if self._verifying is plan:
            self._verifying = None

    def settle(self, row: ScheduledRow, result: RowResult) -> RowResult:
        """Compares a draft with what was drawn. The request's counters and blocks move back to what is right of it.

        Returns:
            The row's result with what follows as far as it holds: after each right token of the draft what was drawn,
            and after the last of these a token more.
        """
        request, draft = row.request, row.draft
        drawn = (result, *result.following)
        path = draft.held(lambda parent, token: drawn[1 + parent].is_token(token))
        self._outcomes.append(DraftOutcome(request, draft, path, tuple(after.drawn_or_none for after in drawn)))
        if request.status is RequestStatus.RUNNING:
            self._moves += self._misplaced(request, row.start + 1, path)
            request.num_computed_tokens = row.start + 1 + len(path)
            self._trim(request, request.num_computed_tokens + 1)
        return replace(result, following=tuple(drawn[1 + index] for index in path))

    def _misplaced(self, request: Request, first: int, path: Sequence[int]) -> list[tuple[int, int]]:
        """The moves of a path's tokens to the positions from `first` on, where the draft's first token is."""
        places = [(first + index, first + target) for target, index in enumerate(path) if index != target]
        return [(self._slot(request, source), self._slot(request, target)) for source, target in places]

    def _slot(self, request: Request, place: int) -> int:
        size = self._manager.block_size
        return request.block_ids[place // size] * size + place % size

    def take_changes(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Copies and moves within the pool (`StepPlan`) that are due and that no plan has yet."""
        moves, self._moves = tuple(self._moves), []
        return self._manager.take_copies(), moves

    def take_outcomes(self) -> list[DraftOutcome]:
        """Those since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _trim(self, request: Request, num_tokens: int) -> None:
        """Gives back blocks behind the first `num_tokens` tokens."""
        needed = self._manager.blocks_for(num_tokens)
        while len(request.block_ids) > needed:
            self._manager.drop_last(request)


def _is_decoding(request: Request) -> bool:
    """It lacks its last token and no other, all are known, and nobody changes them between steps."""
    return (
        request.num_known_tokens - request.num_computed_tokens == 1
        and not request.num_inflight
        and not request.is_paused
        and not request.is_synchronous
        and request.draft is NO_DRAFT
    )
