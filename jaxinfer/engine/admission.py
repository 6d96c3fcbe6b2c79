"""Admission: the way of requests from their arrival to a slot."""

from collections import Counter
from collections.abc import Iterable, Sequence

from jaxinfer.cache.block_manager import BlockManager
from jaxinfer.engine.capacity import Capacity
from jaxinfer.engine.chunk_draft import ChunkDraft
from jaxinfer.engine.plan import ScheduledRow
from jaxinfer.engine.prefix_reuse import PrefixReuse
from jaxinfer.engine.request import Request, RequestStatus
from jaxinfer.engine.running_set import RunningSet
from jaxinfer.engine.waiting_queue import WaitingQueue


class Admission:
    """Keeps the requests that have no slot, and gives them one, with blocks, in their order.

    Of several samples of one prompt the first is queued; the others, its followers, are when it has computed the
    prompt, so that they find it in the pool.

    Args:
        block_manager: the pool.
        capacity: how much of it a request takes.
        running: who has a slot.
        reuse: finds what a request need not compute.
    """

    def __init__(
        self, block_manager: BlockManager, capacity: Capacity, running: RunningSet, reuse: PrefixReuse
    ) -> None:
        self._manager = block_manager
        self._capacity = capacity
        self._running = running
        self._reuse = reuse
        self._queue = WaitingQueue()
        self._leaders: dict[Request, Request] = {}
        self._num_arrived = 0

    def __len__(self) -> int:
        """Requests without a slot."""
        return len(self._queue) + len(self._leaders)

    @property
    def has_queue(self) -> bool:
        """Somebody waits for nothing but a slot and blocks."""
        return len(self._queue) > 0

    def arrive(self, group: Sequence[Request], by_priority: bool) -> None:
        """Checks a new request, hashes its tokens and gives it, and those behind it in its group, their places in the
        order.

        Args:
            group: a request, and its followers.
            by_priority: the order is first one of priorities.

        Raises:
            ValueError: the prompt does not fit the pool or leaves no room for a token.
        """
        request, *followers = group
        num_known = request.num_known_tokens
        self._capacity.check_fits(num_known)
        if not 0 < num_known < request.max_total_tokens:
            raise ValueError(
                f"a prompt of {num_known} tokens must have at least 1 and fewer than "
                f"max_total_tokens={request.max_total_tokens}; change the prompt or raise max_model_len"
            )
        self._reuse.arrive(request)
        for member in group:
            member.max_total_tokens = self._capacity.bound(member.max_total_tokens)
            member.order = (member.priority if by_priority else 0, member.arrival_time, self._num_arrived)
            self._num_arrived += 1
            if followers:
                member.siblings = group
                member.block_keys = request.block_keys.copy()
        self.follow(request, followers)

    def queue(self, request: Request) -> None:
        """A request waits for a slot; one that had one before is in its old place."""
        self._queue.push(request)

    def pause(self, request: Request) -> None:
        """A request does not wait for a slot any more, until it is queued again."""
        if request in self._leaders:
            raise ValueError(f"request {request.request_id!r} waits for a sibling's prompt and cannot be paused")
        self._queue.remove(request)

    def follow(self, leader: Request, followers: Sequence[Request]) -> None:
        """New requests wait for the leader to compute the prompt of all."""
        leader.followers += followers
        self._leaders.update((follower, leader) for follower in followers)

    def release_followers(self, rows: Sequence[ScheduledRow]) -> None:
        """Queues the followers of requests whose prompts are complete with these rows."""
        if not self._leaders:
            return
        for row in rows:
            if row.samples and row.request.followers:
                for follower in row.request.followers:
                    del self._leaders[follower]
                    self._queue.push(follower)
                row.request.followers = []

    def note_finished(self, request: Request) -> None:
        """A request without a slot has just got the status FINISHED."""
        leader = self._leaders.pop(request, None)
        if leader is None:
            self._queue.note_finished()
        else:
            leader.followers.remove(request)

    def pass_on(self, request: Request) -> None:
        """Of the followers of a request that ended before its prompt was complete, the first leads the others."""
        if request.followers:
            leader, *followers = request.followers
            request.followers = []
            del self._leaders[leader]
            self._queue.push(leader)
            self.follow(leader, followers)

    def offer(self, draft: ChunkDraft) -> None:
        """Moves requests from the head of the queue into the draft while they are admissible. They own what they reuse
        from now on, so that nobody else is given these blocks."""
        manager = self._manager
        room = manager.num_free_blocks - sum(map(self.blocks_ahead, self._running))
        # Who waits for a running sibling's prompt comes before all that wait in the queue.
        slots = self._running.num_free_slots - sum(len(request.followers) for request in self._running)
        # Whoever is admitted needs at least one block of its own.
        while room > 0 and slots > 0 and draft.spare_rows and draft.tokens_left:
            head = self._queue.peek()
            if head is None or head.num_inflight:
                break
            num_free = manager.num_free_blocks
            self._reuse.advance(head)
            self._reuse.adopt_prompt(head)
            room -= num_free - manager.num_free_blocks + self.blocks_ahead(head)
            if room < 0:
                self._reuse.let_go(head)
                break
            self._queue.pop()
            draft.spare_rows -= 1
            slots -= 1 + len(head.followers)
            if not draft.offer(head, is_last=not self._queue or not draft.spare_rows or slots <= 0):
                break

    def blocks_ahead(self, request: Request) -> int:
        """Blocks that the request lacks for its tokens and for one block of growth, as far as it can grow."""
        manager = self._manager
        horizon = min(request.num_tokens + manager.block_size, request.max_total_tokens - 1)
        missing = self._capacity.blocks_ahead(horizon, request.num_computed_tokens, len(request.block_ids))
        return missing + manager.shares_block(request, request.num_computed_tokens)

    def admit(self, chunks: Sequence[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Slots and blocks for requests that were offered; from the first without a share on they go back.

        Returns:
            Those that are admitted, with their shares.
        """
        placed: list[tuple[Request, int]] = []
        for index, (request, share) in enumerate(chunks):
            if not share or index > len(placed):
                self._reuse.let_go(request)
                self._queue.push(request)
                continue
            # Again, since those before it in this step may have begun with the same tokens.
            self._reuse.advance(request)
            start = request.num_computed_tokens
            share = min(share, request.num_tokens - start, self._manager.room(request, start))
            self._running.add(request)
            self._reuse.note_admission(request)
            if not self._manager.allocate_writable(request, start, start + share):
                raise RuntimeError(f"request {request.request_id!r} was admitted without free blocks")
            self._reuse.publish(request, start + share)
            placed.append((request, share))
        return placed

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Compares where unfinished requests are with what they say.

        Args:
            requests: all of them.

        Raises:
            RuntimeError: a request is not in exactly one place (a slot, the queue, behind a sibling, paused without a
                slot), or a place holds one that is none of these.
        """
        self._running.check_integrity()
        places = Counter(self._queue.waiting())
        if len(self._queue) != places.total():
            raise RuntimeError(f"the queue counts {len(self._queue)} requests and has {places.total()}")
        places.update(self._running)
        places.update(list(self._leaders))
        for follower, leader in self._leaders.items():
            if leader.followers.count(follower) != 1 or leader.is_finished:
                raise RuntimeError(f"request {follower.request_id!r} is not behind {leader.request_id!r}")
        for request in requests:
            is_running = request.status is RequestStatus.RUNNING
            expected = 1 if is_running or not request.is_paused else 0
            if places.pop(request, 0) != expected or is_running != (request.slot >= 0) or request.is_finished:
                raise RuntimeError(
                    f"request {request.request_id!r} with status {request.status}, slot {request.slot} and "
                    f"is_paused={request.is_paused} is not in the one place that this means"
                )
        if places:
            raise RuntimeError(f"unknown requests wait or run: {[request.request_id for request in places]}")
