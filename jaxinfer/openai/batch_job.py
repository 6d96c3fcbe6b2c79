"""A batch job: the lines of a file through an engine, results written as they finish."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.replicas import AnyEngine, num_lost
from jaxinfer.openai.batch_input import BatchLine
from jaxinfer.openai.batch_output import BatchOutput
from jaxinfer.openai.batch_result import line_answer, line_result
from jaxinfer.openai.request import ApiRequest, RequestReader
from jaxinfer.serving.request_loop import RequestLoop


@dataclass
class _Serving:
    """A line whose prompts are in the engine."""

    line: BatchLine
    request: ApiRequest
    outputs: dict[int, RequestOutput] = field(default_factory=dict)


class BatchJob:
    """Serves batch lines; a few more than can run at once are read ahead.

    Args:
        engine: nobody else steps it meanwhile.
        reader: of request bodies.
        output: where results go.
        model_name: of the responses.
        on_result: called after each line's result is on the disk, with whether it is an error.
    """

    def __init__(
        self,
        engine: AnyEngine,
        reader: RequestReader,
        output: BatchOutput,
        model_name: str,
        on_result: Callable[[bool], None] = lambda is_error: None,
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._output = output
        self._model_name = model_name
        self._on_result = on_result
        self._serving: dict[str, tuple[_Serving, int]] = {}
        self._again: deque[BatchLine] = deque()
        self._results: list[dict[str, Any]] = []

    def run(self, lines: Iterable[BatchLine]) -> None:
        """Serves lines until there are no more.

        Raises:
            EngineDeadError: a step failed. Lines under way have no result; a later job does them.
            KeyboardInterrupt: on Ctrl-C, after the results of the current step are written.
        """
        window = 2 * self._engine.max_num_seqs
        remaining = iter(lines)
        line = next(remaining, None)
        with RequestLoop(self._engine) as loop:
            while line is not None or len(loop):
                while line is not None and len(loop) < window and len(self._results) < window:
                    self._begin(line, loop)
                    line = next(remaining, None)
                if len(loop):
                    self._step(loop)
                if line is None and self._again:
                    line = self._again.popleft()
                self._write()

    def _step(self, loop: RequestLoop) -> None:
        """Lines of a replica that dies are served again, by the others."""
        lost = num_lost(self._engine)
        outputs = loop.step()
        has_lost = num_lost(self._engine) > lost
        for output in outputs:
            serving, place = self._serving.pop(output.request_id, (None, 0))
            if serving is None:
                continue
            if has_lost and output.error is not None:
                self._give_up(serving, loop)
            else:
                self._collect(serving, place, output)

    def _give_up(self, serving: _Serving, loop: RequestLoop) -> None:
        others = [request_id for request_id, (line, _) in self._serving.items() if line is serving]
        loop.abort(*others)
        for request_id in others:
            del self._serving[request_id]
        self._again.append(serving.line)

    def _begin(self, line: BatchLine, loop: RequestLoop) -> None:
        added: list[str] = []
        try:
            if line.error is not None:
                raise ValueError(line.error)
            request = self._reader.read(line.url, line.body)
            serving = _Serving(line, request)
            for place, prompt in enumerate(request.prompts):
                request_id = f"{line.number}-{place}"
                loop.add(request_id, prompt, request.params)
                added.append(request_id)
                self._serving[request_id] = (serving, place)
        except (ValueError, TypeError, RecursionError) as error:  # the last for JSON that is nested too deeply
            loop.abort(*added)
            for request_id in added:
                del self._serving[request_id]
            self._results.append(line_result(line, 400, error=str(error)))

    def _collect(self, serving: _Serving, place: int, output: RequestOutput) -> None:
        serving.outputs[place] = output
        if len(serving.outputs) == len(serving.request.prompts):
            outputs = [serving.outputs[place] for place in sorted(serving.outputs)]
            self._results.append(line_answer(serving.line, serving.request, outputs, self._model_name))

    def _write(self) -> None:
        if self._results:
            self._output.write(self._results)
            for result in self._results:
                self._on_result(result["error"] is not None)
            self._results = []
