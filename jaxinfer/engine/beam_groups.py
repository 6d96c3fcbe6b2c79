"""Beam groups: the prompts whose beams are searched, and the requests that compute them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxinfer.engine.beam_search import Beam, BeamSearch, Candidates
from jaxinfer.engine.beam_search_params import BeamSearchParams
from jaxinfer.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprobs
from jaxinfer.engine.plan import RowResult
from jaxinfer.engine.request import Request
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.version_runs import VersionRuns
from jaxinfer.tokenizers.detokenizer import Detokenizer
from jaxinfer.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger("jaxinfer")
_BEAM = "/beam"


@dataclass(eq=False, slots=True)
class _Group:
    """A prompt as the caller added it; `requests` compute the search's beams, in their order."""

    request_id: str
    prompt: str | None
    params: BeamSearchParams
    search: BeamSearch
    metrics: RequestMetrics
    requests: list[Request]
    found: dict[Request, Candidates] = field(default_factory=dict)
    versions: VersionRuns = field(default_factory=VersionRuns)
    num_made: int = 1

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.requests[0].prompt_token_ids


class BeamGroups:
    """Runs beam searches on requests that the scheduler serves like any others.

    Every beam is a request whose draws are thrown away: what counts are the best log-probabilities of its row. Then it
    is paused, until those of all beams of its prompt are there and the search says how they go on: a request takes the
    first continuation of its beam itself, further ones are forks of it that share its blocks, and one without a
    continuation ends. A beam that loses its blocks computes its tokens again.

    Args:
        scheduler: serves the requests; nothing is in flight when it is called from here.
        tokenizer: makes the text; None when there is none.

    Attributes:
        weight_version: of the parameters that made what is accepted.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer | None) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._groups: dict[str, _Group] = {}
        self._members: dict[Request, _Group] = {}
        self._done: list[RequestOutput] = []
        self.weight_version = 0

    def __len__(self) -> int:
        """Prompts that have not finished."""
        return len(self._groups)

    def __contains__(self, request_id: str) -> bool:
        """An unfinished prompt has this id, or may give it to one of its beams."""
        searched, _, number = request_id.rpartition(_BEAM)
        return request_id in self._groups or (number.isdecimal() and searched in self._groups)

    def owns(self, request: Request) -> bool:
        """The request computes a beam."""
        return request in self._members

    def add(
        self, request_id: str, prompt: str | None, request: Request, params: BeamSearchParams, end_ids: frozenset[int]
    ) -> None:
        """Begins a search.

        Args:
            request_id: of the prompt; unique.
            prompt: its text, handed through.
            request: computes the prompt; the scheduler has it already. Its `max_total_tokens` bounds the search, and
                its `params.logprobs` are the search's `num_candidates`, or the whole vocabulary.
            params: of the search.
            end_ids: ids that end a sequence.
        """
        max_tokens = request.max_total_tokens - request.num_prompt_tokens
        search = BeamSearch(params.beam_width, max_tokens, params.length_penalty, end_ids)
        metrics = RequestMetrics(arrival_time=request.arrival_time)
        group = _Group(request_id, prompt, params, search, metrics, [request])
        self._groups[request_id] = self._members[request] = group

    def accept(self, request: Request, row: RowResult, dispatched_at: float, now: float) -> None:
        """Takes what a row of one of the requests brought, times being those of its step."""
        group = self._members[request]
        metrics = group.metrics
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = dispatched_at
            metrics.num_cached_tokens = request.num_cached_tokens
        if row.token_id is None or row.logprobs is None:
            return
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        metrics.last_token_time = now
        request.output_token_ids.pop()
        self._scheduler.pause(request)
        group.found[request] = Candidates(row.logprobs.token_ids[0].tolist(), row.logprobs.logprobs[0].tolist())
        if len(group.found) == len(group.requests):
            self._advance(group, now)

    def fail(self, request: Request, error: str, now: float) -> None:
        """Ends the search of a beam that cannot be computed."""
        self._close(self._members[request], "error", now, error)

    def abort(self, request_id: str, now: float) -> None:
        """Ends a search with what it has found; an unknown id is passed over."""
        if (group := self._groups.get(request_id)) is not None:
            self._close(group, "abort", now)

    def drop_all(self, error: str, now: float) -> None:
        """Ends all searches with an error, without asking the scheduler."""
        for group in list(self._groups.values()):
            self._close(group, "error", now, error, scheduler_lives=False)

    def unfinished_ids(self) -> list[str]:
        """The ids of all prompts that have not finished."""
        return list(self._groups)

    def take_outputs(self) -> list[RequestOutput]:
        """The searches that have ended since the last call."""
        done, self._done = self._done, []
        return done

    def _advance(self, group: _Group, now: float) -> None:
        """All beams have their candidates: the search goes on, and the requests become its new beams."""
        before, found = group.requests, group.found
        group.found = {}
        group.versions.add(self.weight_version)
        try:
            continuations = group.search.advance([found[request] for request in before])
        except Exception as failure:
            # Nothing has changed for the scheduler, so others need not end too.
            logger.exception("the beam search of request %r failed", group.request_id)
            self._close(group, "error", now, f"the beam search failed ({type(failure).__name__}: {failure})")
            return
        if group.search.is_done:
            self._close(group, "stop", now)
            return
        goes_on = {parent for parent, _ in continuations}
        for index, request in enumerate(before):
            if index not in goes_on:
                self._scheduler.finish(request, "stop")  # first, since its slot may be wanted
                del self._members[request]
        first: dict[int, int] = {}
        group.requests = [
            before[parent] if first.setdefault(parent, place) == place else self._fork(group, before[parent], token)
            for place, (parent, token) in enumerate(continuations)
        ]
        for parent, place in first.items():
            before[parent].output_token_ids.append(continuations[place].token_id)
            self._scheduler.resume(before[parent])

    def _fork(self, group: _Group, source: Request, token_id: int) -> Request:
        """A request for another continuation of the source's beam; to be called before the source takes its own."""
        group.num_made += 1
        while (beam_id := f"{group.request_id}{_BEAM}{group.num_made}") in self._scheduler:
            group.num_made += 1  # a request that was there before the search has this id
        twin = source.twin(beam_id, output_token_ids=[*source.output_token_ids, token_id])
        self._members[twin] = group
        return self._scheduler.fork(source, twin)

    def _close(
        self, group: _Group, reason: str, now: float, error: str | None = None, scheduler_lives: bool = True
    ) -> None:
        for request in group.requests:
            del self._members[request]
            if scheduler_lives:
                self._scheduler.finish(request, reason, error=error)
        del self._groups[group.request_id]
        group.metrics.finished_time = now
        self._done.append(self._output(group, None if reason == "stop" else reason, error))

    def _output(self, group: _Group, reason: str | None, error: str | None) -> RequestOutput:
        beams = group.search.best()
        if reason is not None:
            beams += [beam for beam in group.search.beams if beam.length][: group.params.beam_width - len(beams)]
        samples = [self._completion(group, index, beam, reason) for index, beam in enumerate(beams)]
        if not samples:
            samples = [CompletionOutput(index=0, text="", token_ids=[], finish_reason=reason)]
        group.metrics.num_generation_tokens = sum(beam.length for beam in beams)
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=group.prompt_token_ids,
            outputs=samples,
            finished=True,
            metrics=group.metrics,
            num_cached_tokens=group.metrics.num_cached_tokens,
            error=error,
        )

    def _completion(self, group: _Group, index: int, beam: Beam, reason: str | None) -> CompletionOutput:
        path = beam.path()
        shows_end = group.params.include_stop_str_in_output or not beam.ends
        ids = [step.token_id for step in (path if shows_end else path[:-1])]
        return CompletionOutput(
            index=index,
            text=self._text(group.prompt_token_ids, ids, skip_special_tokens=not (beam.ends and shows_end)),
            token_ids=ids,
            cumulative_logprob=beam.cum_logprob,
            logprobs=[self._logprobs(step) for step in path],
            finish_reason=reason or ("stop" if beam.ends else "length"),
            stop_reason=None,
            weight_versions=group.versions.between(0, len(ids)),
        )

    def _text(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        if self._tokenizer is None:
            return ""
        detokenizer = Detokenizer(self._tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
        for token_id in token_ids:
            detokenizer.append(token_id)
        detokenizer.finish()
        return detokenizer.text

    def _logprobs(self, step: Beam) -> TokenLogprobs:
        """The candidates that a token was chosen from, itself first."""
        text = None if self._tokenizer is None else self._tokenizer.token_text
        entries = {
            token_id: Logprob(logprob, rank, None if text is None else text(token_id))
            for rank, (token_id, logprob) in enumerate(zip(*step.candidates, strict=True), start=1)
        }
        return {step.token_id: entries.pop(step.token_id), **entries}
