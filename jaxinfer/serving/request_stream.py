"""A request of an AsyncLLM as its caller holds it: iterate over its outputs, or await the last one."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import replace
from typing import Any

from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.serving.engine_thread import AsyncRequest, EngineThread
from jaxinfer.serving.mailbox import Mailbox
from jaxinfer.serving.request_params import final_only, gives_deltas


class RequestStream(AsyncIterator[RequestOutput]):
    """`async for output in stream` yields outputs until one is finished; `await stream` returns the finished one.

    The request is queued when the stream is first used. It is aborted as soon as nobody waits for it any more: the
    consumer is cancelled, `aclose()` is called, or the stream is dropped (by a consumer that breaks off or fails, say).

    Args:
        thread: runs the request.
        prepare: makes the request, on first use; its errors are raised there.
        owner: kept alive as long as the stream.
    """

    def __init__(self, thread: EngineThread, prepare: Callable[[], AsyncRequest], owner: object) -> None:
        self._thread = thread
        self._prepare = prepare
        self._owner = owner
        self._request_id: str | None = None
        self._mailbox: Mailbox | None = None
        self._consumer: asyncio.Task[Any] | None = None
        self._on_consumer_done = _closer(self)
        self._is_done = False

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        """Raises ValueError or TypeError for a request the engine refuses, EngineDeadError when the engine is gone,
        RuntimeError while another task waits for an output."""
        if self._is_done:
            raise StopAsyncIteration
        if self._mailbox is not None and self._mailbox.has_waiter:
            raise RuntimeError("another task waits for this request's next output; give each consumer its own request")
        try:
            mailbox = self._mailbox or self._start(self._prepare())
            self._watch_consumer()
            output = await mailbox.get()
        except BaseException:
            self._close()
            raise
        if output.finished:
            self._finish()
        return output

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._final().__await__()

    async def aclose(self) -> None:
        """Aborts the request unless it has finished."""
        self._close()

    def __del__(self) -> None:
        self._close()

    async def _final(self) -> RequestOutput:
        if self._mailbox is not None or self._is_done:
            raise RuntimeError("this request is being iterated or was awaited already; start another with generate()")
        try:
            request = self._prepare()
            self._start(replace(request, params=final_only(request.params)))
        except BaseException:
            self._close()
            raise
        async for output in self:
            if output.finished:
                return output
        raise AssertionError("a stream ends with a finished output")

    def _start(self, request: AsyncRequest) -> Mailbox:
        self._request_id = request.request_id
        self._mailbox = Mailbox(asyncio.get_running_loop(), gives_deltas(request.params))
        self._thread.add(request, self._mailbox)
        return self._mailbox

    def _watch_consumer(self) -> None:
        """A consumer that is cancelled between two items never comes back here, so its task is watched."""
        task = asyncio.current_task()
        if task is not self._consumer:
            self._unwatch_consumer()
            self._consumer = task
            if task is not None:
                task.add_done_callback(self._on_consumer_done)

    def _unwatch_consumer(self) -> None:
        if self._consumer is not None:
            self._consumer.remove_done_callback(self._on_consumer_done)
            self._consumer = None

    def _finish(self) -> None:
        self._is_done = True
        self._unwatch_consumer()

    def _close(self) -> None:
        if not self._is_done:
            self._finish()
            if self._request_id is not None and self._mailbox is not None:
                self._thread.abandon(self._request_id, self._mailbox)


def _closer(stream: RequestStream) -> Callable[[asyncio.Task[Any]], None]:
    """Closes the stream when its consumer was cancelled, without keeping the stream alive."""
    reference = weakref.ref(stream)

    def close(task: asyncio.Task[Any]) -> None:
        left = reference()
        if left is not None and task.cancelled():
            left._close()

    return close
