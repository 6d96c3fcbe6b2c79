"""SIGINT waits for a safe moment; a second one does not."""

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from jaxinfer.serving.interrupt import DeferredInterrupt


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_the_first_waits_for_check() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt() as interrupt:
        interrupt.check()
        signal.raise_signal(signal.SIGINT)
        reached = True
        interrupt.check()
    assert reached


def test_the_second_acts_at_once() -> None:
    with DeferredInterrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()


def test_one_that_was_never_checked_acts_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt():
        signal.raise_signal(signal.SIGINT)


def test_the_users_handler_is_called_and_put_back() -> None:
    calls = []

    def handler(signum: int, frame: FrameType | None) -> None:
        calls.append(signum)

    signal.signal(signal.SIGINT, handler)
    with DeferredInterrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert calls == []
        interrupt.check()
        assert calls == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ignored_signals_and_other_threads_are_left_alone() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with DeferredInterrupt():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def work() -> None:
        with DeferredInterrupt():
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
