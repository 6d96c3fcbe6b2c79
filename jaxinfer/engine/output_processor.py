"""The output processor: gathers what the steps bring back into RequestOutputs."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.engine.logprobs import token_logprobs
from jaxinfer.engine.outputs import RequestMetrics, RequestOutput, TokenLogprobs
from jaxinfer.engine.plan import DraftOutcome, RowLogprobs, RowResult, ScheduledRow
from jaxinfer.engine.request import Request
from jaxinfer.engine.sample import Sample
from jaxinfer.engine.sampling_params import RequestOutputKind
from jaxinfer.engine.speculation_stats import SpeculationStats
from jaxinfer.tokenizers.tokenizer import Tokenizer


@dataclass(eq=False, slots=True)
class _Group:
    """A prompt as the caller added it, with its `n` samples."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    kind: RequestOutputKind
    metrics: RequestMetrics
    samples: list[Sample]
    prompt_logprobs: list[TokenLogprobs | None] | None
    num_running: int
    error: str | None = None


class OutputProcessor:
    """Turns committed tokens into outputs. Requests that stream give one RequestOutput a step with all their samples;
    FINAL_ONLY requests cost nothing until they end.

    Args:
        tokenizer: makes the text; None when there is none.

    Attributes:
        weight_version: of the parameters that made the tokens that are appended.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._groups: dict[str, _Group] = {}
        self._members: dict[Request, tuple[_Group, Sample]] = {}
        self._sample_ids: set[str] = set()
        self._due: dict[str, _Group] = {}
        self.weight_version = 0

    def __contains__(self, request_id: str) -> bool:
        """An unfinished request or sample has this id."""
        return request_id in self._groups or request_id in self._sample_ids

    def __len__(self) -> int:
        """Requests (not samples) that have not finished."""
        return len(self._groups)

    def add(self, request_id: str, prompt: str | None, requests: Sequence[Request]) -> None:
        """Registers the samples of one prompt. The first one's parameters hold for the group."""
        first = requests[0]
        samples = [Sample(request, self._tokenizer) for request in requests]
        group = _Group(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=first.prompt_token_ids,
            kind=first.params.output_kind,
            metrics=RequestMetrics(arrival_time=first.arrival_time),
            samples=samples,
            prompt_logprobs=_unscored(first),
            num_running=len(samples),
        )
        self._groups[request_id] = group
        for sample in samples:
            self._members[sample.request] = (group, sample)
            self._sample_ids.add(sample.request.request_id)

    def requests(self, request_id: str) -> list[Request]:
        """The samples of a request that have not ended; none for an unknown id."""
        group = self._groups.get(request_id)
        return [] if group is None else [sample.request for sample in group.samples if not sample.is_done]

    def request(self, request_id: str, index: int) -> Request | None:
        """One sample of a request, None when there is no such sample or it has ended."""
        group = self._groups.get(request_id)
        if group is None or not 0 <= index < len(group.samples) or group.samples[index].is_done:
            return None
        return group.samples[index].request

    def unfinished_ids(self) -> list[str]:
        """The ids of all requests (not samples) that have not finished."""
        return list(self._groups)

    def unfinished_requests(self) -> list[Request]:
        """All samples that have not ended."""
        return list(self._members)

    def started(self, request: Request, when: float) -> None:
        """A step with this request was dispatched at `when`; only the first time counts."""
        metrics = self._members[request][0].metrics
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = when

    def guessed(self, outcome: DraftOutcome, draft_seconds: float, verify_seconds: float) -> None:
        """A draft was verified, guessed and computed in so long; of an unfinished request or not."""
        member = self._members.get(outcome.request)
        if member is None:
            return
        metrics = member[0].metrics
        if metrics.speculation is None:
            metrics.speculation = SpeculationStats()
        metrics.speculation.add(outcome.num_accepted, outcome.num_drafted, outcome.draft.depth)
        metrics.speculation.num_verify_steps += 1
        metrics.speculation.draft_seconds += draft_seconds
        metrics.speculation.verify_seconds += verify_seconds

    def append(self, request: Request, result: RowResult, dispatched_at: float, now: float) -> str | None:
        """Takes the token that was just appended to `request`, from a step dispatched and arrived at these times.

        Returns:
            The stop text that the token completes, else None.
        """
        group, sample = self._members[request]
        metrics = group.metrics
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = dispatched_at
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        metrics.last_token_time = now
        metrics.num_generation_tokens += 1
        stop = sample.append(request.output_token_ids[-1], result.logprobs, self.weight_version)
        if group.kind is not RequestOutputKind.FINAL_ONLY and sample.is_due():
            self._due[group.request_id] = group
        return stop

    def score(self, row: ScheduledRow, logprobs: RowLogprobs) -> None:
        """Takes the log-probabilities of the prompt tokens that follow the row's first tokens.

        A preempted request scores its prompt again; positions that are there already stay. No output shows any before
        all are there.
        """
        group = self._members[row.request][0]
        scored = group.prompt_logprobs
        if scored is None:
            return
        params = row.request.params
        text = self._tokenizer.token_text if self._tokenizer and params.detokenize else None
        for index in range(row.num_scored):
            position = row.start + 1 + index
            if position == len(scored):
                token_id = group.prompt_token_ids[position]
                scored.append(token_logprobs(logprobs, index, token_id, params.prompt_logprobs or 0, text))

    def finish(self, request: Request, now: float) -> None:
        """Closes a sample whose request has ended."""
        group, sample = self._members.pop(request)
        self._sample_ids.discard(request.request_id)
        sample.finish()
        group.num_running -= 1
        group.error = group.error or request.error
        if group.num_running == 0:
            group.metrics.finished_time = now
            del self._groups[group.request_id]
        if group.num_running == 0 or group.kind is not RequestOutputKind.FINAL_ONLY:
            self._due[group.request_id] = group

    def take_outputs(self) -> list[RequestOutput]:
        """Everything due since the last call, one RequestOutput for each request."""
        due, self._due = self._due, {}
        return [self._output(group) for group in due.values()]

    def _output(self, group: _Group) -> RequestOutput:
        delta = group.kind is RequestOutputKind.DELTA
        scored = group.prompt_logprobs
        # The prompt is scored in chunks with its first sample, and the others may be ahead.
        if scored is not None and len(scored) < len(group.prompt_token_ids):
            scored = None
        elif delta:
            group.prompt_logprobs = None
        group.metrics.num_cached_tokens = group.samples[0].request.num_cached_tokens
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=group.prompt_token_ids,
            prompt_logprobs=scored,
            outputs=[
                sample.completion(index) for index, sample in enumerate(group.samples) if not delta or sample.has_news()
            ],
            finished=group.num_running == 0,
            metrics=group.metrics,
            num_cached_tokens=group.metrics.num_cached_tokens,
            error=group.error,
        )


def _unscored(request: Request) -> list[TokenLogprobs | None] | None:
    """An entry for each prompt token before the first that is scored; None where none is."""
    if request.params.prompt_logprobs is None:
        return None
    return [None] * (1 if request.scoring is None else request.scoring.start)
