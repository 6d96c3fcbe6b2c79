"""The scheduler: which requests compute how many tokens in the next step, and what their results mean."""

from collections import deque
from collections.abc import Sequence

from jaxinfer.cache.block_manager import BlockManager
from jaxinfer.cache.sight import BlockSight
from jaxinfer.config import CacheConfig, SchedulerConfig, SpeculationConfig
from jaxinfer.engine.admission import Admission
from jaxinfer.engine.capacity import Capacity
from jaxinfer.engine.chunk_draft import ChunkDraft
from jaxinfer.engine.draft_room import DraftRoom
from jaxinfer.engine.kv_waste import KVWaste, count_slots
from jaxinfer.engine.plan import RowResult, StepPlan, StepResult, UncommittedStep
from jaxinfer.engine.prefix_reuse import PrefixReuse
from jaxinfer.engine.request import Request, RequestStatus
from jaxinfer.engine.running_set import RunningSet
from jaxinfer.engine.scheduler_stats import SchedulerStats
from jaxinfer.engine.step_rows import chunk_rows, decode_rows


class Scheduler:
    """Splits each step's token budget over requests whose `num_computed_tokens` chases `num_tokens`.

    There is one rule and there are no phases. Running requests that lack one token get it first; what is left is
    shared over those that lack more (`TokenBudget`), running ones before waiting ones, in order: by arrival, under the
    "priority" policy by priority and then arrival. The work of a step is linear in the running requests.

    A request's life:

    1. `add` puts it into the waiting queue, at its place in the order. Of several samples of one prompt only the first
       does not wait until the prompt has been computed.
    2. It is admitted when it is the first there, a slot is free, and so are blocks for all its tokens and for one
       block of growth of everybody running: it gets a slot, its admission count goes up, and its first chunk is
       scheduled. What the prefix cache has of it, or a sibling that runs, it does not compute (`PrefixReuse`).
    3. Each step it is scheduled in moves `num_computed_tokens` at once, and blocks are appended as needed; one that
       others own too is copied before the request writes to it. A row that reaches the last token draws the next one,
       which counts in `num_inflight`.
    4. `schedule` may be called while one step is uncommitted. A request whose last token is in flight is scheduled on
       top of it (`token_on_device`), unless that token is certain to be its last.
    5. `commit` appends the drawn token. The caller then looks whether it ends the request and calls `finish`.
    6. A running request that finds no free block takes those of the worst running one, which loses everything but its
       tokens and waits in its old place; a token it has in flight is still appended by its commit, and by the time it
       can be admitted again the host knows all its tokens. A request never takes from a better one: the worst keeps
       its blocks and sits the step out. The best can take from all others, so every step makes progress. Blocks that
       others share stay theirs, and full ones stay in the prefix cache until they are needed: when it is admitted
       again it finds what is left of them, its own output included.
    7. `finish` and `abort`, at any moment, free slot and blocks at once. Blocks and slot may be handed out again while
       a step with the old owner is in flight: the device runs steps in order.
    8. Rows of finished requests in a step still in flight are dropped when it is committed.
    9. A request with a draft (`DraftRoom`) computes it behind its last token; `commit` goes back over what was wrong.

    A request ends with "length" at the latest when it alone fills the pool: `add` lowers its `max_total_tokens` to
    that. Where every layer has a window, blocks that none sees any more are free again before each step.

    Args:
        config: sizes, policy and step sizes.
        cache: sizes of the KV pool.
        window: positions that a token sees in the layer that sees furthest, its own included; None for all.
        speculation: how far ahead tokens are guessed; None not at all.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        window: int | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> None:
        self.block_manager = BlockManager(cache)
        sight = BlockSight(cache.block_size, window)
        self.capacity = Capacity(self.block_manager.num_blocks, sight, config.max_num_batched_tokens)
        self._reuse = PrefixReuse(self.block_manager, sight, cache.enable_prefix_caching)
        self._hides = window is not None
        self._config = config
        self._block_size = cache.block_size
        # A block's worth, but small enough that under a small budget a few long prompts leave something for others.
        self._min_chunk = min(cache.block_size, max(1, config.max_num_batched_tokens // 32))
        self._requests: dict[str, Request] = {}
        self._running = RunningSet(config.max_num_seqs)
        self.draft_room = DraftRoom(self.block_manager, self._running, config, speculation)
        self._admission = Admission(self.block_manager, self.capacity, self._running, self._reuse)
        self._uncommitted: deque[UncommittedStep] = deque()
        self._waste = KVWaste()
        self._num_steps = self._num_tokens = self._num_preemptions = 0

    def __contains__(self, request_id: str) -> bool:
        """An unfinished request has this id."""
        return request_id in self._requests

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._admission)

    @property
    def has_unfinished(self) -> bool:
        """Requests wait or run. A step may be uncommitted even when none do."""
        return bool(self._requests)

    @property
    def must_sync(self) -> bool:
        """The next step needs token ids on the host: commit everything before `schedule`."""
        return self._running.must_sync or self.draft_room.must_sync

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_blocks=self.block_manager.num_blocks,
            num_free_blocks=self.block_manager.num_free_blocks,
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            num_preemptions=self._num_preemptions,
            num_prefix_queries=self._reuse.num_queries,
            num_prefix_hits=self._reuse.num_hits,
            kv_waste_mean=self._waste.mean,
            kv_waste_worst=self._waste.worst,
        )

    def add(self, request: Request, followers: Sequence[Request] = ()) -> None:
        """Puts a new request into the waiting queue.

        Args:
            request: the request.
            followers: further samples of its prompt, with keys of their own. They are scheduled when `request` has
                computed the prompt, or the next of them if it ends before, and share its blocks.

        Raises:
            ValueError: the prompt does not fit the pool or leaves no room for a token, or the id is in use.
        """
        self._register(request, followers)
        self._admission.queue(request)

    def fork(self, source: Request, request: Request, followers: Sequence[Request] = ()) -> Request:
        """Adds and returns a request that begins with the source's tokens: it shares the source's blocks as far as both
        have the same tokens, at once if the source runs and a slot is free; else it waits for its turn like any other,
        and shares what the prefix cache has then. A shared block that is not full is copied before one of them writes.

        May be called whenever no `schedule` is under way, also while the source has tokens in flight: these are not
        the new request's, which draws its own.

        Args:
            source: an unfinished request.
            request: a new one, such as `source.twin(...)`; of its tokens at least one is computed.
            followers: as for `add`.

        Raises:
            ValueError: the source has finished; or as for `add`.
        """
        if source.is_finished:
            raise ValueError(f"request_id={source.request_id!r} has finished; only unfinished requests can be forked")
        num_common = source.num_common(request)
        if request.cache_salt == source.cache_salt:
            request.block_keys = source.block_keys[: num_common // self._block_size]
        self._register(request, followers)
        num_shared = min(source.num_computed_tokens, num_common, request.num_known_tokens - 1)
        can_run = source.status is RequestStatus.RUNNING and self._running.num_free_slots and num_shared > 0
        if can_run and self._reuse.adopt(request, source, num_shared):
            self._running.add(request)
            self._reuse.note_admission(request)
        else:
            self._admission.queue(request)
        return request

    def pause(self, request: Request) -> None:
        """It computes nothing until `resume`. While it runs it keeps slot and blocks; one without does not wait."""
        if not request.is_paused and request.status is RequestStatus.WAITING:
            self._admission.pause(request)
        request.is_paused = True

    def resume(self, request: Request) -> None:
        """Ends a pause: it goes on where it was, or waits for its turn if it lost its blocks."""
        if request.is_paused and request.status is RequestStatus.WAITING:
            self._admission.queue(request)
        request.is_paused = False

    def preempt_paused(self) -> bool:
        """For when nobody can compute: takes the blocks of the worst paused request. False when none has any."""
        paused = [request for request in self._running if request.is_paused]
        if paused:
            self._preempt(paused[-1])
        return bool(paused)

    def forget_prefixes(self) -> None:
        """Empties the prefix cache and keeps what running requests compute out of it: they go on with keys and values
        of older parameters, and nobody else is to see those."""
        self.block_manager.forget_all()
        for request in self._running:
            request.is_findable = False

    def reset_prefix_cache(self, preempt: bool = False) -> bool:
        """Empties the prefix cache, unless requests own blocks.

        Args:
            preempt: take the blocks of those that run; they compute their tokens again.

        Returns:
            Whether it is empty now; nothing has changed when not.
        """
        if preempt:
            self.preempt_all()
        if self.block_manager.num_used_blocks:
            return False
        self.block_manager.forget_all()
        return True

    def abort(self, request_id: str) -> Request | None:
        """Finishes a request with "abort"; None when no unfinished request has this id."""
        if (request := self._requests.get(request_id)) is not None:
            self.finish(request, "abort")
        return request

    def finish(
        self, request: Request, reason: str, stop_reason: int | str | None = None, error: str | None = None
    ) -> None:
        """Ends a request and frees all it holds. A request that has finished stays as it is.

        Args:
            reason: "stop", "length", "abort" or "error".
            stop_reason: the stop text or stop token id.
            error: the message for "error".
        """
        if request.is_finished:
            return
        if was_running := request.status is RequestStatus.RUNNING:
            self._release(request)
        request.status = RequestStatus.FINISHED
        if not was_running and not request.is_paused:
            self._admission.note_finished(request)
        self._admission.pass_on(request)
        request.num_inflight = 0
        request.finish_reason, request.stop_reason, request.error = reason, stop_reason, error
        del self._requests[request.request_id]

    def preempt_all(self) -> None:
        """Takes slots and blocks of all that run, who then wait in their old places, and empties the prefix cache."""
        while self._running:
            self._preempt(self._running.worst)
        self.block_manager.forget_all()

    def schedule(self) -> StepPlan | None:
        """Plans the next step and moves the counters as if it were done. The plan is to be executed before anything
        else is called: it reads the requests' block tables.

        Returns:
            None when nobody can compute anything before the step in flight is committed, or at all.

        Raises:
            RuntimeError: two steps are uncommitted.
        """
        if len(self._uncommitted) > 1:
            raise RuntimeError("two steps are uncommitted; commit the older one before scheduling another")
        decodes, prefills = self._choose_decodes()
        chunks = self._choose_chunks(prefills, sum(1 + len(request.draft.token_ids) for request in decodes))
        placed = self._grow_chunks(chunks[: len(prefills)], decodes)
        placed += self._admission.admit(chunks[len(prefills) :])
        rows = decode_rows(decodes) + chunk_rows(placed)
        if not rows:
            return None
        for row in rows[: len(decodes)]:
            if (row.start + 1) % self._block_size == 0:
                self._reuse.publish(row.request, row.start + 1)
        self._admission.release_followers(rows)
        plan = StepPlan(tuple(rows), sum(row.num_tokens for row in rows), *self.draft_room.take_changes())
        self._num_steps += 1
        self._num_tokens += plan.num_tokens
        slots = count_slots(self.block_manager.num_used_blocks, self._block_size, self._running)
        self._uncommitted.append(UncommittedStep(plan, *slots))
        return self.draft_room.scheduled(plan)

    def commit(self, plan: StepPlan, result: StepResult) -> list[tuple[Request, RowResult]]:
        """Appends the drawn tokens of the oldest uncommitted step.

        Returns:
            The rows whose requests are still unfinished. Where `finite` is False no token was appended, and the
            caller has to finish the request before the next `schedule`; likewise where the new token ends it. What
            follows a row's first token is the caller's to `append`.

        Raises:
            ValueError: another step has to be committed first, or the results are not as many as the rows.
        """
        if not self._uncommitted or self._uncommitted[0].plan is not plan:
            raise ValueError("steps are committed once each, in the order they were scheduled")
        if len(result.rows) != len(plan.rows):
            raise ValueError(f"{len(result.rows)} results for the {len(plan.rows)} rows of the step")
        accepted = []
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            request = row.request
            if request.status is RequestStatus.FINISHED:
                continue
            request.num_inflight -= row.samples
            if row.draft.token_ids:
                row_result = self.draft_room.settle(row, row_result)
            if row.samples or not row_result.finite:
                self.append(request, row_result)
            accepted.append((request, row_result))
        done = self._uncommitted.popleft()
        self.draft_room.note_committed(plan)
        self._waste.record(done.num_slots, done.num_tokens, result.device_seconds)
        return accepted

    def append(self, request: Request, result: RowResult) -> None:
        """Appends a drawn token; `commit` does for the first of each row, the caller for what follows it."""
        if not result.finite:
            self._reuse.withdraw(request)
            return
        request.output_token_ids.append(result.drawn)
        if request.num_known_tokens % self._block_size == 0:
            self._reuse.publish(request, request.num_computed_tokens)

    def check_integrity(self) -> None:
        """Raises RuntimeError when requests, slots, queue or blocks do not agree; linear in all of them."""
        self.block_manager.check_integrity()
        self._admission.check_integrity(self._requests.values())

    def _register(self, request: Request, followers: Sequence[Request]) -> None:
        """Checks a new request and gives it and its followers their places in the order."""
        group = (request, *followers)
        for member in group:
            if member.request_id in self._requests:
                raise ValueError(f"request_id={member.request_id!r} belongs to an unfinished request; use another")
        self._admission.arrive(group, self._config.policy == "priority")
        self._requests.update((member.request_id, member) for member in group)

    def _choose_decodes(self) -> tuple[list[Request], list[Request]]:
        """Running requests that get their one missing token, blocks for it included, and those that lack more."""
        block_size, num_refs, cached = self._block_size, self.block_manager.num_refs, self.block_manager.cache.keys
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self._running:
            num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids) + request.num_inflight
            if num_tokens >= request.max_total_tokens or request.is_paused:
                continue  # its last token is in flight, or the next is not known yet
            if self._hides:
                self._reuse.hide(request)
            if num_tokens - request.num_computed_tokens > 1:
                self._reuse.advance_running(request)
                prefills.append(request)
                continue
            blocks = request.block_ids
            fits = num_tokens <= len(blocks) * block_size and num_refs[blocks[-1]] == 1 and blocks[-1] not in cached
            if fits or self._grow(request, num_tokens, decodes):
                decodes.append(request)
        return decodes, prefills

    def _choose_chunks(self, prefills: list[Request], num_decodes: int) -> list[tuple[Request, int]]:
        """Shares for all of `prefills`, then for requests of the queue; maybe 0. `num_decodes` tokens are taken."""
        config = self._config
        spare_rows = config.max_num_seqs - len(self._running)
        draft = ChunkDraft(config.max_num_batched_tokens - num_decodes, spare_rows, self._min_chunk)
        for index, request in enumerate(prefills):
            nobody_waits = not self._admission.has_queue or not self._running.num_free_slots
            draft.offer(request, is_last=nobody_waits and index + 1 == len(prefills))
        if self._admission.has_queue and draft.spare_rows and draft.tokens_left:
            self._admission.offer(draft)
        return draft.chunks(num_decodes, config.token_buckets)

    def _grow_chunks(self, chunks: list[tuple[Request, int]], decodes: list[Request]) -> list[tuple[Request, int]]:
        """Blocks for running requests' chunks; a chunk shrinks to the free blocks before anybody is preempted."""
        manager, placed = self.block_manager, []
        for request, share in chunks:
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted by a better one of this loop
            self._reuse.advance_running(request)
            start = request.num_computed_tokens
            share = min(share, max(manager.room(request, start), 1), request.num_tokens - start)
            if share and self._grow(request, start + share, decodes):
                self._reuse.publish(request, start + share)
                placed.append((request, share))
        return placed

    def _grow(self, request: Request, num_tokens: int, decodes: list[Request]) -> bool:
        """Gives a running request blocks that it may write to up to `num_tokens` tokens, taken from worse requests
        when too few are free; these leave `decodes`, the requests chosen for this step, best first."""
        while not self.block_manager.allocate_writable(request, request.num_computed_tokens, num_tokens):
            worst = self._running.worst
            if worst is request:
                return False
            if decodes and decodes[-1] is worst:
                decodes.pop()
            self._preempt(worst)
        return True

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.status = RequestStatus.WAITING
        if not request.is_paused:
            self._admission.queue(request)
        self._num_preemptions += 1

    def _release(self, request: Request) -> None:
        """Takes slot and blocks away from a running request."""
        self._running.remove(request)
        self._reuse.let_go(request)
