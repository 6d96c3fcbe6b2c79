"""RequestLoop: requests through an engine in the calling thread, their outputs as they come."""

from types import TracebackType

from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.replicas import AnyEngine
from jaxinfer.engine.request import Scoring
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.serving.inputs import TokenizedPrompt
from jaxinfer.serving.interrupt import DeferredInterrupt


class RequestLoop:
    """A context in which the caller adds requests at any time and calls `step` until none is left.

    Ctrl-C raises KeyboardInterrupt between two steps only, so what a step returned can be written down in peace. What
    is unfinished when the context is left is aborted, and the engine stays usable.

    Args:
        engine: nobody else steps it meanwhile.
    """

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine
        self._interrupt = DeferredInterrupt()
        self._unfinished: set[str] = set()

    def __enter__(self) -> "RequestLoop":
        self._engine.check_alive()
        self._interrupt.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort(*self._unfinished)
        self._interrupt.__exit__(kind, error, traceback)

    def __len__(self) -> int:
        """Requests that have not finished."""
        return len(self._unfinished)

    def add(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        scoring: Scoring | None = None,
    ) -> None:
        """Queues a request; arguments and errors are those of `Engine.add_request`."""
        self._engine.add_request(
            request_id,
            prompt.token_ids,
            params,
            prompt=prompt.text,
            arrival_time=arrival_time,
            cache_salt=prompt.cache_salt,
            scoring=scoring,
        )
        self._unfinished.add(request_id)

    def abort(self, *request_ids: str) -> None:
        """Drops requests; nothing more is returned for them."""
        self._unfinished.difference_update(request_ids)
        self._engine.abort(request_ids)

    def step(self) -> list[RequestOutput]:
        """Completes one step.

        Raises:
            EngineDeadError: it failed; its cause says why.
            KeyboardInterrupt: Ctrl-C came since the last step.
        """
        self._interrupt.check()
        outputs = self._engine.step()
        self._engine.check_alive()
        self._unfinished.difference_update(output.request_id for output in outputs if output.finished)
        return outputs
