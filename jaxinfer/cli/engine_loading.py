"""Making the engine for a subcommand."""

import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxinfer.startup.args import EngineArgs
    from jaxinfer.startup.loading import EngineParts


def load(args: "EngineArgs") -> "EngineParts":
    """`load_engine`, during which Ctrl-C ends the process at once with status 130.

    A KeyboardInterrupt would not do: it is lost when it comes inside one of JAX's garbage collection callbacks, and
    otherwise waits for the programs that are being compiled. Nothing is open yet that would have to be put in order.
    """
    before = signal.getsignal(signal.SIGINT)
    can_handle = threading.current_thread() is threading.main_thread() and callable(before)
    if can_handle:
        signal.signal(signal.SIGINT, _leave)
    try:
        from jaxinfer.startup.loading import load_engine

        return load_engine(args, None, None)
    finally:
        if can_handle:
            signal.signal(signal.SIGINT, before)


def _leave(signum: int, frame: FrameType | None) -> None:
    os._exit(130)
