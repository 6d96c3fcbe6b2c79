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

    def remove(self, request: Request) -> None:
        """Takes out a request that is somewhere in the queue; linear in its length."""
        self._keep([entry for entry in self._heap if entry[1] is not request])

    def waiting(self) -> list[Request]:
        """All that wait, in no order."""
        return [request for _, request in self._heap if request.status is not RequestStatus.FINISHED]

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
            self._keep(self._heap)

    def _keep(self, entries: list[tuple[tuple[int, float, int], Request]]) -> None:
        """Nothing but these stays, of them what has not finished."""
        self._heap = [entry for entry in entries if entry[1].status is not RequestStatus.FINISHED]
        heapq.heapify(self._heap)
        self._num_finished = 0
