"""The running set: requests that hold a slot, the best first."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import pairwise
from operator import attrgetter

from jaxinfer.engine.draft import NO_DRAFT
from jaxinfer.engine.request import Request, RequestStatus

_order = attrgetter("order")


class RunningSet:
    """Requests in `Request.order`, each with a slot of its own.

    Args:
        num_slots: C, requests that may run at the same time. The lowest free slot is given first, so that a lightly
            used engine touches few.
    """

    def __init__(self, num_slots: int) -> None:
        self._requests: list[Request] = []
        self._free_slots = list(range(num_slots))
        self._num_sync = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Best first. The worst may be removed while iterating: what is gone is not visited."""
        return iter(self._requests)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def must_sync(self) -> bool:
        """Some request's next draw depends on token ids that the host has to know."""
        return self._num_sync > 0

    @property
    def worst(self) -> Request:
        """The first to be preempted: the last in order."""
        return self._requests[-1]

    def add(self, request: Request) -> None:
        """Gives the request the lowest free slot; there must be one."""
        request.status = RequestStatus.RUNNING
        request.slot = heapq.heappop(self._free_slots)
        request.admission += 1
        self._num_sync += _needs_host_tokens(request)
        insort(self._requests, request, key=_order)

    def remove(self, request: Request) -> None:
        """Takes the slot away, and with it what was guessed; the status is the caller's to set."""
        del self._requests[bisect_left(self._requests, request.order, key=_order)]
        heapq.heappush(self._free_slots, request.slot)
        request.slot, request.draft = -1, NO_DRAFT
        self._num_sync -= _needs_host_tokens(request)

    def check_integrity(self) -> None:
        """Compares requests, order and slots.

        Raises:
            RuntimeError: a request is here twice, out of order or without RUNNING, or the slots do not add up.
        """
        orders = [request.order for request in self._requests]
        if any(after <= before for before, after in pairwise(orders)):
            raise RuntimeError(f"running requests are out of order or there twice: {orders}")
        for request in self._requests:
            if request.status is not RequestStatus.RUNNING:
                raise RuntimeError(f"request {request.request_id!r} has a slot and the status {request.status}")
        slots = sorted([*self._free_slots, *(request.slot for request in self._requests)])
        if slots != list(range(len(slots))):
            raise RuntimeError(f"a slot is lost, free and taken, or taken twice: {slots}")
        if self._num_sync != sum(map(_needs_host_tokens, self._requests)):
            raise RuntimeError(f"{self._num_sync} running requests are said to need their tokens on the host")


def _needs_host_tokens(request: Request) -> bool:
    """Bad words of several tokens are matched on the host, and some requests' tokens are chosen there."""
    return request.is_synchronous or any(len(word) > 1 for word in request.params.bad_words_token_ids)
