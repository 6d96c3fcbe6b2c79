"""Ctrl-C at a safe moment: between two steps of an engine, never inside one."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class DeferredInterrupt:
    """While this context is open in the main thread, SIGINT waits until `check` is called. A second SIGINT that comes
    before that acts at once, in case the step hangs.

    The handler that was there is called by `check` and is put back at the end. Nothing is done in other threads
    (Python runs handlers in the main one) or where SIGINT is ignored or not handled by Python.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._pending = False

    def __enter__(self) -> "DeferredInterrupt":
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if kind is None:
                self.check()

    def check(self) -> None:
        """Lets a SIGINT that came since the last call act: usually raises KeyboardInterrupt."""
        if self._pending and self._handler is not None:
            self._pending = False
            self._handler(signal.SIGINT, None)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._pending and self._handler is not None:
            self._handler(signum, frame)
        self._pending = True
