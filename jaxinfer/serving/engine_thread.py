"""The engine's thread: steps an Engine in the background and hands its outputs to event loops."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.replicas import AnyEngine
from jaxinfer.engine.request import Scoring
from jaxinfer.serving.held_intake import HeldIntake, run_task
from jaxinfer.serving.inputs import TokenizedPrompt
from jaxinfer.serving.mailbox import Mailbox
from jaxinfer.serving.request_params import RequestParams
from jaxinfer.serving.stats_log import StatsLog


@dataclass(frozen=True, slots=True)
class AsyncRequest:
    """What a consumer asks for."""

    request_id: str
    prompt: TokenizedPrompt
    params: RequestParams
    priority: int
    scoring: Scoring | None = None


class EngineThread:
    """Owns an Engine. All work on it happens in one thread, which takes commands between two steps and sleeps while
    there is nothing to do. It starts with the first command.

    Args:
        engine: nobody else may step it.
        log: told after every step.
    """

    def __init__(self, engine: AnyEngine, log: StatsLog) -> None:
        self._engine = engine
        self._log = log
        self._commands: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._mailboxes: dict[str, Mailbox] = {}
        self._intake = HeldIntake()
        self._is_frozen = False
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()
        self._stopping = False
        self._closed = False
        self._failure: BaseException | None = None

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Has the thread call `function` between two steps. The result is an EngineDeadError once the thread ended."""
        future: Future[Any] = Future()
        self._start()
        self._commands.put((future, function))
        if self._closed:
            self._refuse_commands()
        return future

    def add(self, request: AsyncRequest, mailbox: Mailbox) -> None:
        """Queues a request; outputs and errors go to the mailbox."""

        def add() -> None:
            prompt = request.prompt
            self._engine.add_request(
                request.request_id,
                prompt.token_ids,
                request.params,
                prompt=prompt.text,
                priority=request.priority,
                cache_salt=prompt.cache_salt,
                scoring=request.scoring,
            )
            self._mailboxes[request.request_id] = mailbox

        def report(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None:
                mailbox.fail(error)
                self._wake([mailbox])

        def arrive() -> None:
            held: Future[Any] = Future()
            held.add_done_callback(report)
            self._intake.take(request.request_id, mailbox, (held, add))

        self.call(arrive).add_done_callback(report)

    @property
    def is_held(self) -> bool:
        """New requests wait until `release`."""
        return self._intake.is_held

    def hold(self) -> Future[Any]:
        """Has new requests wait until `release`."""
        return self.call(self._intake.hold)

    def freeze(self) -> Future[Any]:
        """Has no step made until `release`."""
        return self.call(lambda: setattr(self, "_is_frozen", True))

    def release(self) -> Future[Any]:
        """Ends `hold` and `freeze`."""

        def release() -> None:
            self._is_frozen = False
            self._intake.release()

        return self.call(release)

    def call_when_idle(self, function: Callable[[], Any]) -> Future[Any]:
        """Has the thread call `function` once all requests have finished; those that come meanwhile wait for it."""
        result: Future[Any] = Future()

        def begin() -> None:
            if self._is_frozen and self._engine.has_unfinished_requests():
                raise ValueError(
                    "mode='wait' would wait for ever: requests were stopped by pause_generation(mode='keep'); call "
                    "resume_generation() first, or use 'keep' or 'abort'"
                )
            self._intake.when_idle((result, function))

        def report(future: Future[Any]) -> None:
            if (error := future.exception()) is not None:
                result.set_exception(error)

        self.call(begin).add_done_callback(report)
        return result

    def abandon(self, request_id: str, mailbox: Mailbox) -> None:
        """Drops a request that nobody waits for. Takes no lock: garbage collection may call it at any moment."""

        def drop() -> None:
            self._intake.forget(mailbox)
            if self._mailboxes.get(request_id) is mailbox:
                del self._mailboxes[request_id]
                self._engine.abort([request_id])

        self._commands.put((Future(), drop))

    def call_for_outputs(self, function: Callable[[], Iterable[RequestOutput]]) -> Future[Any]:
        """Has the thread call `function` and hands the outputs that it returns to their consumers."""
        return self.call(lambda: self._deliver(function()))

    def abort(self, request_ids: Iterable[str]) -> Future[Any]:
        """Ends requests with finish_reason "abort"; unknown ids are fine."""
        ids = list(request_ids)

        def abort() -> Iterable[RequestOutput]:
            self._intake.let_in(ids)
            return self._engine.abort(ids)

        return self.call_for_outputs(abort)

    def stop(self) -> None:
        """Ends the thread after its current step; requests under way fail with EngineDeadError. Idempotent."""
        with self._start_lock:
            thread = self._thread
            if thread is None:
                self._closed = True
                return
        self._commands.put((Future(), self._request_stop))
        if thread is not threading.current_thread():
            thread.join()

    def _start(self) -> None:
        with self._start_lock:
            if self._thread is None and not self._closed:
                # A daemon, so that a forgotten engine does not keep the interpreter from ending.
                self._thread = threading.Thread(target=self._run, name="jaxinfer-engine", daemon=True)
                self._thread.start()

    def _request_stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_commands()
                if not self._stopping and self._can_step:
                    self._deliver(self._engine.step())
                    self._log.tick(self._engine)
                if self._intake.has_idle_tasks and not self._engine.has_unfinished_requests():
                    self._intake.run_idle_tasks()
        except BaseException as error:
            self._failure = error
        self._closed = True
        self._refuse_commands()
        self._intake.refuse(self._dead_error())
        mailboxes, self._mailboxes = [*self._mailboxes.values(), *self._intake.mailboxes], {}
        for mailbox in mailboxes:
            mailbox.fail(self._dead_error())
        self._wake(mailboxes)

    @property
    def _can_step(self) -> bool:
        return self._engine.can_step and not self._is_frozen

    def _run_commands(self) -> None:
        """Runs every command there is; waits for one while the engine has nothing to do."""
        idle = not self._can_step
        with contextlib.suppress(Empty):
            while True:
                task = self._commands.get(block=idle)
                idle = False
                run_task(task)

    def _refuse_commands(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                future, _ = self._commands.get(block=False)
                if future.set_running_or_notify_cancel():
                    future.set_exception(self._dead_error())

    def _dead_error(self) -> EngineDeadError:
        error = EngineDeadError(str(self._failure or "the engine has been shut down; make a new one"))
        error.__cause__ = self._failure
        return error

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        woken = []
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is None:
                continue
            if output.finished:
                del self._mailboxes[output.request_id]
            if mailbox.put(output):
                woken.append(mailbox)
        self._wake(woken)

    def _wake(self, mailboxes: list[Mailbox]) -> None:
        """One call into each event loop, however many of its consumers have news."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Mailbox]] = {}
        for mailbox in mailboxes:
            by_loop.setdefault(mailbox.loop, []).append(mailbox)
        for loop, waiting in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake_all, waiting)
            except RuntimeError:  # the loop is closed: nobody will ever read these
                self._forget(waiting)

    def _forget(self, mailboxes: list[Mailbox]) -> None:
        lost = [request_id for request_id, mailbox in self._mailboxes.items() if mailbox in mailboxes]
        for request_id in lost:
            del self._mailboxes[request_id]
        self._engine.abort(lost)


def _wake_all(mailboxes: list[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.wake()
