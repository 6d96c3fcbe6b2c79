"""One call of LLM.generate: its requests from the first token to the last output."""

import warnings
from collections.abc import Iterator, Sequence
from typing import TypeVar

from jaxinfer.engine.beam_search_params import BeamSearchParams
from jaxinfer.engine.outputs import CompletionOutput, RequestOutput
from jaxinfer.engine.replicas import AnyEngine
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.serving.inputs import TokenizedPrompt
from jaxinfer.serving.interrupt import DeferredInterrupt
from jaxinfer.serving.progress import RequestProgress
from jaxinfer.serving.request_params import RequestParams, final_only, num_samples
from jaxinfer.serving.stats_log import StatsLog
from jaxinfer.serving.step_gate import StepGate

_Item = TypeVar("_Item")


class BatchRun:
    """Serves the prompts of one call.

    Args:
        engine: nobody else steps it meanwhile.
        log: told after every step.
        counter: makes the request ids.
        gate: held by the caller; opened for others between two steps.
    """

    def __init__(self, engine: AnyEngine, log: StatsLog, counter: Iterator[int], gate: StepGate) -> None:
        self._engine = engine
        self._gate = gate
        self._outputs: dict[int, RequestOutput] = {}
        self._log = log
        self._counter = counter
        self._places: dict[str, int] = {}

    def serve(
        self,
        items: Sequence[TokenizedPrompt],
        sampling_params: RequestParams | Sequence[SamplingParams],
        priorities: Sequence[int] | None,
        progress: RequestProgress,
    ) -> list[RequestOutput]:
        """One finished output for each prompt, in order; see `LLM.generate`."""
        self._engine.check_alive()
        params: Sequence[RequestParams]
        if isinstance(sampling_params, BeamSearchParams):
            params = [sampling_params] * len(items)
        else:
            params = _one_each("sampling_params", sampling_params, SamplingParams, len(items))
        ranks = [0] * len(items) if priorities is None else _one_each("priority", priorities, int, len(items))
        outputs = self._outputs
        try:
            with DeferredInterrupt() as interrupt:
                self._add(items, params, ranks, outputs)
                while self._places:
                    self.take(self._engine.step(), progress)
                    self._log.tick(self._engine)
                    self._gate.run_tasks()
                    interrupt.check()
        except BaseException:
            self._engine.abort(list(self._places))
            raise
        _warn_of_errors(outputs)
        return [outputs[place] for place in range(len(items))]

    def _add(
        self,
        items: Sequence[TokenizedPrompt],
        params: Sequence[RequestParams],
        ranks: Sequence[int],
        outputs: dict[int, RequestOutput],
    ) -> None:
        """Queues every prompt that can be served; the others get their output at once."""
        finals = {id(one): final_only(one) for one in params}
        refusals: list[ValueError] = []
        for place, (item, one, rank) in enumerate(zip(items, params, ranks, strict=True)):
            request_id = str(next(self._counter))
            self._places[request_id] = place
            try:
                self._engine.add_request(
                    request_id,
                    item.token_ids,
                    finals[id(one)],
                    prompt=item.text,
                    priority=rank,
                    cache_salt=item.cache_salt,
                )
            except ValueError as error:
                del self._places[request_id]
                refusals.append(error)
                outputs[place] = _refused(request_id, item, one, str(error))
        if refusals and not self._places:
            raise refusals[0]

    def take(self, outputs: Sequence[RequestOutput], progress: RequestProgress | None = None) -> None:
        """Takes outputs of the engine; those of its own requests are final."""
        for output in outputs:
            place = self._places.pop(output.request_id, None)
            if place is not None:
                self._outputs[place] = output
                if progress is not None:
                    progress.finished(output)


def _one_each(name: str, given: _Item | Sequence[_Item], kind: type[_Item], count: int) -> list[_Item]:
    """`given` as a list with one entry for each prompt."""
    values = [given] * count if isinstance(given, kind) else given
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"{name}={given!r} must be one {kind.__name__}, or a list with one for each prompt")
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(f"{name} holds {value!r}, not a {kind.__name__}")
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts; give one for each, or a single one")
    return list(values)


def _refused(request_id: str, item: TokenizedPrompt, params: RequestParams, error: str) -> RequestOutput:
    samples = [
        CompletionOutput(index=index, text="", token_ids=[], finish_reason="error")
        for index in range(num_samples(params))
    ]
    return RequestOutput(request_id, item.text, item.token_ids, outputs=samples, finished=True, error=error)


def _warn_of_errors(outputs: dict[int, RequestOutput]) -> None:
    failed = [(place, output.error) for place, output in sorted(outputs.items()) if output.error is not None]
    if failed:
        place, error = failed[0]
        warnings.warn(
            f"{len(failed)} of {len(outputs)} prompts ended with an error; the first is prompt {place}: {error}",
            stacklevel=5,
        )
