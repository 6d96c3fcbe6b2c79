"""Held intake: requests that came while nothing may begin, and what is to be done once everything has ended."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

from jaxinfer.serving.mailbox import Mailbox

Task = tuple[Future[Any], Callable[[], Any]]
"""A function and the future of its result."""


class _Arrival(NamedTuple):
    request_id: str
    mailbox: Mailbox
    task: Task


class HeldIntake:
    """Lets requests in, in their order: at once, or when nobody holds them back any more. For the engine's thread."""

    def __init__(self) -> None:
        self.is_held = False
        self._arrivals: list[_Arrival] = []
        self._when_idle: list[Task] = []

    @property
    def has_idle_tasks(self) -> bool:
        """Something waits for the last request to finish."""
        return bool(self._when_idle)

    @property
    def mailboxes(self) -> list[Mailbox]:
        """Of the requests that wait here."""
        return [arrival.mailbox for arrival in self._arrivals]

    def take(self, request_id: str, mailbox: Mailbox, task: Task) -> None:
        """A request has come; the task adds it to the engine."""
        if self.is_held or self._when_idle:
            self._arrivals.append(_Arrival(request_id, mailbox, task))
        else:
            run_task(task)

    def hold(self) -> None:
        """Requests wait from now on."""
        self.is_held = True

    def release(self) -> None:
        """Ends `hold`."""
        self.is_held = False
        self._let_in()

    def let_in(self, request_ids: Iterable[str]) -> None:
        """Adds these requests to the engine now if they wait here."""
        wanted = set(request_ids)
        chosen = [arrival for arrival in self._arrivals if arrival.request_id in wanted]
        self._arrivals = [arrival for arrival in self._arrivals if arrival.request_id not in wanted]
        for arrival in chosen:
            run_task(arrival.task)

    def forget(self, mailbox: Mailbox) -> None:
        """Drops the request of a consumer that has gone."""
        self._arrivals = [arrival for arrival in self._arrivals if arrival.mailbox is not mailbox]

    def when_idle(self, task: Task) -> None:
        """To be done once no request is unfinished; those that come meanwhile wait for it."""
        self._when_idle.append(task)

    def run_idle_tasks(self) -> None:
        """No request is unfinished."""
        tasks, self._when_idle = self._when_idle, []
        for task in tasks:
            run_task(task)
        self._let_in()

    def refuse(self, error: BaseException) -> None:
        """The engine has ended: fails what waits for it to be idle."""
        tasks, self._when_idle = self._when_idle, []
        for future, _ in tasks:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _let_in(self) -> None:
        if not self.is_held and not self._when_idle:
            arrivals, self._arrivals = self._arrivals, []
            for arrival in arrivals:
                run_task(arrival.task)


def run_task(task: Task) -> None:
    """Calls the function, unless nobody waits for it any more, and hands on what it returns or raises."""
    future, function = task
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
