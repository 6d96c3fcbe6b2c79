"""A step gate: who may use an engine that several threads share, and what is done between two of its steps."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any

POLL_SECONDS = 0.002
"""How long a thread waits before it looks again whether nobody uses the engine any more."""


class StepGate:
    """A lock that one thread holds while it uses an engine, for many steps maybe; others can have something done
    between two of these. Whoever holds it may take it again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def __enter__(self) -> "StepGate":
        self._lock.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def between_steps(self, function: Callable[[], Any]) -> Any:
        """Calls `function` at once, or between two steps of the thread that uses the engine; returns and raises what
        it does."""
        future: Future[Any] = Future()
        self._tasks.append((future, function))
        while not future.done():
            if self._lock.acquire(timeout=POLL_SECONDS):
                try:
                    self.run_tasks()
                finally:
                    self._lock.release()
        return future.result()

    def run_tasks(self) -> None:
        """For the thread that holds the gate: does what others want done between two steps."""
        while self._tasks:
            future, function = self._tasks.popleft()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
