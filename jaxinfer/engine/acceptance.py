"""Acceptance: what the results of a step mean for its requests."""

from collections.abc import Sequence

from jaxinfer.engine.beam_groups import BeamGroups
from jaxinfer.engine.output_processor import OutputProcessor
from jaxinfer.engine.plan import RowResult, StepPlan, StepResult
from jaxinfer.engine.request import Request
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.stopping import check_stop


class Acceptance:
    """Hands results to those who build outputs, and ends the requests that are done or cannot go on.

    Args:
        scheduler: has committed the step.
        outputs: of ordinary requests.
        beams: of those that compute beams.
        dtype: of the model, for messages.
    """

    def __init__(self, scheduler: Scheduler, outputs: OutputProcessor, beams: BeamGroups, dtype: str) -> None:
        self._scheduler = scheduler
        self._outputs = outputs
        self._beams = beams
        self._dtype = dtype

    def take(
        self,
        plan: StepPlan,
        result: StepResult,
        accepted: Sequence[tuple[Request, RowResult]],
        dispatched_at: float,
        now: float,
    ) -> int:
        """Takes one step's results.

        Args:
            plan, result: of the step.
            accepted: what `Scheduler.commit` returned for it.
            dispatched_at, now: when it was handed to the device, and when its results came; on the engine's clock.

        Returns:
            How many tokens were drawn for requests.
        """
        self._score_prompts(plan, result)
        num_drawn = 0
        for request, row in accepted:
            if request.is_finished:
                continue  # with another beam of its prompt, just now
            accept = self._accept_beam if self._beams.owns(request) else self._accept
            num_drawn += accept(request, row, dispatched_at, now)
            for following in row.following:
                if request.is_finished:
                    break
                self._scheduler.append(request, following)
                num_drawn += self._accept(request, following, dispatched_at, now)
        return num_drawn

    def _score_prompts(self, plan: StepPlan, result: StepResult) -> None:
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            scores = row_result.prompt_logprobs
            if scores is not None and row_result.finite and not row.request.is_finished:
                self._outputs.score(row, scores)

    def _accept(self, request: Request, row: RowResult, dispatched_at: float, now: float) -> bool:
        """Takes what one row brought: its token was appended to the request, and may end it."""
        if not row.finite:
            self._finish_with_error(request, _NON_FINITE.format(dtype=self._dtype), now)
            return False
        if row.token_id is None:
            self._outputs.started(request, dispatched_at)
            return False
        if not row.allowed:
            request.output_token_ids.pop()
            self._finish_with_error(request, _NOTHING_PERMITTED, now)
            return False
        stop = check_stop(request)
        if stop is not None:
            self._scheduler.finish(request, stop.reason, stop.stop_reason)
        stop_text = self._outputs.append(request, row, dispatched_at, now)
        if stop_text is not None:
            if stop is None:
                self._scheduler.finish(request, "stop", stop_text)
            elif stop.reason == "length":
                request.finish_reason, request.stop_reason = "stop", stop_text
        if request.is_finished:
            self._outputs.finish(request, now)
        return True

    def _accept_beam(self, request: Request, row: RowResult, dispatched_at: float, now: float) -> bool:
        if not row.finite:
            self._beams.fail(request, _NON_FINITE.format(dtype=self._dtype), now)
            return False
        self._beams.accept(request, row, dispatched_at, now)
        return row.token_id is not None

    def _finish_with_error(self, request: Request, message: str, now: float) -> None:
        self._scheduler.finish(request, "error", error=message)
        self._outputs.finish(request, now)


_NON_FINITE = (
    "the model produced NaN or infinite logits for this request in dtype={dtype}; use dtype='bfloat16' or 'float32', "
    "and check the weights for NaN"
)
_NOTHING_PERMITTED = "allowed_token_ids, bad_words and min_tokens together leave no token that may come next"
