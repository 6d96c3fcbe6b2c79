"""The waiting queue: requests without a slot, the best first."""

import heapq

from jaxinfer.engine.request import Request, RequestStatus


class WaitingQueue:
    """A heap by `Request.order`; a preempted request that is pushed again is back in its old place.

    Requests that finish while they wait stay in the heap until they come up or outnumber the others, so that leaving
    costs O(1) amortised however many wait.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Request]] = []
        self._num_finished = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_finished

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.order, request))

    def peek(self) -> Request | None:
        """The best waiting request, or None."""
        while self._heap and self._heap[0][1].status is RequestStatus.FINISHED:
            heapq.heappop(self._heap)
            self._num_finished -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Takes out the request that `peek` just showed."""
        return heapq.heappop(self._heap)[1]

    def note_finished(self) -> None:
        """One of the queue's requests has just got the status FINISHED."""
        self._num_finished += 1
        if 2 * self._num_finished > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].status is not RequestStatus.FINISHED]
            heapq.heapify(self._heap)
            self._num_finished = 0
