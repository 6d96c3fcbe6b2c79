"""A mailbox: what one request has produced and its consumer has not taken yet."""

import asyncio
import threading
from dataclasses import replace

from jaxinfer.engine.outputs import CompletionOutput, RequestOutput
from jaxinfer.engine.version_runs import joined_runs


class Mailbox:
    """Passes outputs from the engine's thread to one consumer on an event loop.

    It holds one output at most: what a slow consumer has not taken is merged, so nothing piles up. Deltas are
    concatenated, of the other kinds the newest output replaces the one before.

    Args:
        loop: where the consumer runs.
        merge_deltas: the outputs are deltas.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, merge_deltas: bool) -> None:
        self.loop = loop
        self._merge_deltas = merge_deltas
        self._lock = threading.Lock()
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_waiter(self) -> bool:
        """A consumer is waiting in `get`; a second one would never be woken."""
        return self._waiter is not None

    def put(self, output: RequestOutput) -> bool:
        """Adds an output; any thread. Returns whether `wake` has to be called on the loop."""
        with self._lock:
            pending = self._output
            merge = pending is not None and self._merge_deltas
            self._output = merged_deltas(pending, output) if pending is not None and merge else output
            return pending is None

    def fail(self, error: BaseException) -> None:
        """Makes `get` raise once the output that is there has been taken; any thread. `wake` has to follow."""
        with self._lock:
            self._error = error

    def wake(self) -> None:
        """Lets a waiting consumer look again; on the loop only."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> RequestOutput:
        """Waits for an output and takes it."""
        while True:
            with self._lock:
                output, self._output = self._output, None
                if output is not None:
                    return output
                if self._error is not None:
                    raise self._error
                self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None


def merged_deltas(older: RequestOutput, newer: RequestOutput) -> RequestOutput:
    """One DELTA output that says what two in a row say."""
    completions = {completion.index: completion for completion in older.outputs}
    for completion in newer.outputs:
        before = completions.get(completion.index)
        completions[completion.index] = completion if before is None else _joined(before, completion)
    return replace(
        newer,
        prompt_logprobs=older.prompt_logprobs if newer.prompt_logprobs is None else newer.prompt_logprobs,
        outputs=[completions[index] for index in sorted(completions)],
    )


def _joined(older: CompletionOutput, newer: CompletionOutput) -> CompletionOutput:
    return replace(
        newer,
        text=older.text + newer.text,
        token_ids=older.token_ids + newer.token_ids,
        logprobs=None if newer.logprobs is None else (older.logprobs or []) + newer.logprobs,
        weight_versions=joined_runs(older.weight_versions, newer.weight_versions),
    )
