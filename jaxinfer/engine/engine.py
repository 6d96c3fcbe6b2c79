"""The engine: requests go in, steps run, outputs come out. Host only; the device side is a Runner it is handed."""

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from jaxinfer.config import EngineConfig
from jaxinfer.engine.acceptance import Acceptance
from jaxinfer.engine.beam_groups import BeamGroups
from jaxinfer.engine.beam_search_params import BeamSearchParams
from jaxinfer.engine.drafts import Drafts
from jaxinfer.engine.errors import ASLEEP, EngineAsleepError, EngineDeadError, describe_failure
from jaxinfer.engine.intake import Intake
from jaxinfer.engine.output_processor import OutputProcessor
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.plan import DispatchedStep, Runner, Speculation
from jaxinfer.engine.request import Request, RequestStatus, Scoring
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.stats import EngineStats, StepClock, engine_stats
from jaxinfer.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger("jaxinfer")


class Engine:
    """Runs requests one step ahead: while the device works on step i + 1 the host commits step i.

    A row of step i + 1 whose request turns out to have ended in step i is dropped, so what a request returns does not
    depend on running ahead. A step that raises loses the KV cache (it is donated to every step), so it ends all
    requests with an error and the engine is dead: later calls raise EngineDeadError. Not thread-safe.

    Args:
        config: sizes and limits.
        runner: executes plans on the device.
        tokenizer: for text, stop strings and bad words; None serves token ids only.
        eos_token_ids: every id that ends a sequence, from wherever the checkpoint names it.
        speculation: guesses tokens ahead, as far as `config.speculation` says; None for none.
        seeds: for requests that bring none; engines that serve together share them. None begins with `config.seed`.
        clock: seconds; all times in outputs and statistics are on it.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        tokenizer: Tokenizer | None,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        speculation: Speculation | None = None,
        seeds: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.runner = runner
        self.scheduler = Scheduler(config.scheduler, config.cache, config.model.widest_window, config.speculation)
        self._clock = clock
        self._intake = Intake(config, tokenizer, eos_token_ids, seeds or random.Random(config.seed))
        self._outputs = OutputProcessor(tokenizer)
        self._beams = BeamGroups(self.scheduler, tokenizer)
        self._acceptance = Acceptance(self.scheduler, self._outputs, self._beams, config.runner.dtype)
        self._drafts = Drafts(speculation, self.scheduler, self._outputs, runner, clock)
        self._steps: deque[DispatchedStep] = deque()
        self._times = StepClock()
        self._busy_since: float | None = None
        self._is_waiting = False
        self._is_suspended = False
        self._failure: BaseException | None = None
        self.weight_version = 0
        """Counts the parameters that the runner was given: 0 for the first; see `params_changed`."""

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | BeamSearchParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
        scoring: Scoring | None = None,
    ) -> None:
        """Queues a request.

        Args:
            request_id: unique among unfinished requests. While a request "x" with `n` samples is unfinished, "x/0",
                "x/1" and so on are its samples' ids; while a beam search "x" is, "x/beam2" and so on are its beams'.
            prompt_token_ids: 1 to max_model_len - 1 ids of the vocabulary.
            params: checked again and copied. A beam search gives one output, at its end, with its sequences as
                samples.
            prompt: the prompt's text, handed through to the outputs.
            priority: lower runs first under the "priority" policy.
            arrival_time: on the engine's clock; None means now.
            cache_salt: only requests with the same one share keys and values through the prefix cache; how long a
                prompt takes tells nothing about prompts under other salts.
            scoring: the request only scores its tokens (`jaxinfer.serving.scoring`).

        Raises:
            ValueError: this request is refused; the others are unaffected.
            TypeError: likewise, for a wrong type.
            EngineDeadError: a step failed earlier.
            EngineAsleepError: the engine is suspended.
        """
        self._check_serving()
        requests = self._new_requests(request_id, prompt_token_ids, params, priority, arrival_time, cache_salt)
        if scoring is not None:
            self._intake.check_scored(scoring)
            requests[0].scoring = scoring
        self.scheduler.add(requests[0], requests[1:])
        if isinstance(params, BeamSearchParams):
            self._beams.add(request_id, prompt, requests[0], params, self._intake.beam_end_ids(params))
        else:
            self._outputs.add(request_id, prompt, requests)

    def fork(self, request_id: str, new_request_id: str, params: SamplingParams, *, index: int = 0) -> None:
        """Queues a request that goes on from where another one is now: its prompt is the other's prompt with all that
        the other has generated so far. The two share keys and values; of what both have, at most one token is computed
        again, if a slot is free now.

        Args:
            request_id: an unfinished request, which goes on as if nothing had happened.
            new_request_id: unique among unfinished requests.
            params: of the new request, `max_tokens` and the like counted from here on.
            index: which of the other's samples it continues.

        Raises:
            ValueError: no such request or sample is unfinished, or `params` asks for the prompt's log-probabilities,
                for which it would have to be computed again; or as for `add_request`.
            TypeError: `params` are no SamplingParams; or as for `add_request`.
            EngineDeadError: as for `add_request`.
        """
        self._check_serving()
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params={params!r} must be SamplingParams: a fork goes on as samples of its own")
        if params.prompt_logprobs is not None:
            raise ValueError(
                f"prompt_logprobs={params.prompt_logprobs} cannot be had from a fork, which does not compute its "
                "prompt; leave it out, or add the tokens as a request of their own"
            )
        source = self._outputs.request(request_id, index)
        if source is None:
            raise ValueError(f"request_id={request_id!r} has no unfinished sample {index} that could be forked")
        tokens = source.token_ids(0, source.num_known_tokens)
        requests = self._new_requests(new_request_id, tokens, params, source.priority, None, source.cache_salt)
        self.scheduler.fork(source, requests[0], requests[1:])
        self._outputs.add(new_request_id, None, requests)

    def _new_requests(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | BeamSearchParams,
        priority: int,
        arrival_time: float | None,
        cache_salt: str | None,
    ) -> list[Request]:
        """The checked requests of one prompt, whose ids nobody has, not even internally."""
        if not isinstance(request_id, str):
            raise TypeError(f"request_id={request_id!r} must be a str")
        requests = self._intake.requests(
            request_id,
            prompt_token_ids,
            params,
            priority=priority,
            arrival_time=self._clock() if arrival_time is None else arrival_time,
            cache_salt=cache_salt,
        )
        for used in (request_id, *(request.request_id for request in requests)):
            if used in self._outputs or used in self._beams:
                raise ValueError(f"request_id={used!r} is in use by an unfinished request; choose another")
        return requests

    def abort(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """Ends requests at once with finish_reason "abort" and frees what they hold. Ids that are unknown or finished
        are passed over, and so is everything once the engine is dead.

        Returns:
            The last output of each request that was aborted.
        """
        now = self._clock()
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            for request in self._outputs.requests(request_id):
                self.scheduler.finish(request, "abort")
                self._outputs.finish(request, now)
            self._beams.abort(request_id, now)
        return self._take_outputs()

    def abort_all(self) -> list[RequestOutput]:
        """Ends every request as `abort` does."""
        return self.abort(self._outputs.unfinished_ids() + self._beams.unfinished_ids())

    def params_changed(self) -> None:
        """To be called when the runner has got other parameters: steps from now on have the next weight version, and
        the prefix cache is emptied. Requests that run go on with the keys and values they have, and nothing they
        compute is shared with others."""
        self.weight_version += 1
        self.scheduler.forget_prefixes()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Empties the prefix cache, unless requests hold blocks of the pool; then nothing changes and a warning is
        logged. A request whose blocks were taken (preempted) and that waits holds none.

        Args:
            reset_running_requests: take the blocks of those that run; they compute all their tokens again, which does
                not change their outputs.

        Returns:
            Whether the cache is empty now.
        """
        done = self.scheduler.reset_prefix_cache(reset_running_requests)
        if not done:
            logger.warning(
                "the prefix cache was not reset: %d requests are running and hold blocks of it",
                self.scheduler.num_running,
            )
        return done

    def has_unfinished_requests(self) -> bool:
        return self.num_unfinished_requests > 0

    @property
    def num_unfinished_requests(self) -> int:
        """Requests (prompts, not samples) that have not finished."""
        return len(self._outputs) + len(self._beams)

    @property
    def max_num_seqs(self) -> int:
        """Samples that can run at the same time."""
        return self.config.scheduler.max_num_seqs

    @property
    def is_dead(self) -> bool:
        return self._failure is not None

    def check_alive(self) -> None:
        """Raises EngineDeadError, with the failure as its cause, when a step has failed."""
        if self._failure is not None:
            raise EngineDeadError(
                f"the engine is dead since a step failed ({describe_failure(self._failure)}); make a new one"
            ) from self._failure

    @property
    def is_suspended(self) -> bool:
        """`suspend` was called and `resume` was not."""
        return self._is_suspended

    @property
    def can_step(self) -> bool:
        """Requests are unfinished and the engine is not suspended."""
        return self.has_unfinished_requests() and not self._is_suspended

    def suspend(self) -> list[RequestOutput]:
        """Completes the steps in flight and takes every request's blocks, so that no step needs what the pool holds:
        after `resume` requests go on with the tokens they have, whose keys and values are computed again.

        Returns:
            What became due, as `step` does.

        Raises:
            EngineDeadError: an earlier step failed.
        """
        self.check_alive()
        self._is_suspended = True
        outputs: list[RequestOutput] = []
        try:
            while self._steps:
                outputs += self._advance()
        except BaseException:
            self._is_suspended = False
            raise
        if not self.is_dead:
            self.scheduler.preempt_all()
        self._busy_since = None
        return outputs

    def resume(self) -> None:
        """Ends `suspend`. The pool may have been replaced by an empty one."""
        self._is_suspended = False

    def step(self) -> list[RequestOutput]:
        """Completes one step of the device and returns what became due; the next step is dispatched before waiting.

        Returns:
            Outputs of streams with news and of requests that ended; often none while prompts are computed.

        Raises:
            EngineDeadError: an earlier step failed. A step that fails now returns every request with its error.
            EngineAsleepError: the engine is suspended.
        """
        self._check_serving()
        return self._advance()

    def dispatch(self) -> list[RequestOutput]:
        """The first half of `step`: hands the device what it can be given now, and waits for nothing.

        Returns:
            Nothing, unless it fails: then every request with its error.

        Raises:
            EngineDeadError, EngineAsleepError: as `step`.
        """
        self._check_serving()
        return self._advance(completes=False)

    @property
    def is_ready(self) -> bool:
        """`step` would not have to wait for the device, once everything is dispatched."""
        return not self._steps or self._steps[0].pending.is_ready()

    def _advance(self, completes: bool = True) -> list[RequestOutput]:
        start = self._clock()
        self._is_waiting = False
        try:
            self._fill()
            outputs: list[RequestOutput] = []
            if completes:
                outputs = self._complete_step() if self._steps else self._idle()
        except Exception as failure:
            outputs = self._die(failure)
        except BaseException as interrupt:
            # While waiting nothing is half done, so the step can be completed later; anywhere else it is lost.
            if not self._is_waiting:
                self._die(interrupt)
            raise
        end = self._clock()
        self._times.busy += end - (start if self._busy_since is None else self._busy_since)
        self._busy_since = end if self.has_unfinished_requests() else None
        return outputs

    def stats(self) -> EngineStats:
        """Counts and times since the engine was made. Also of a dead engine."""
        unfinished, compiled = self.num_unfinished_requests, self.runner.num_compiled + self._drafts.num_compiled
        return engine_stats(self._times, self.scheduler.stats, unfinished, compiled, self._drafts.stats)

    def _check_serving(self) -> None:
        self.check_alive()
        if self._is_suspended:
            raise EngineAsleepError(ASLEEP)

    def _fill(self) -> None:
        """Dispatches until one step runs and one is queued, or one alone when its tokens decide about the next."""
        while not self._is_suspended and len(self._steps) < (1 if self.scheduler.must_sync else 2):
            if not self._steps:
                self._drafts.make()
            start = self._clock()
            plan = self.scheduler.schedule()
            scheduled = self._clock()
            self._times.schedule += scheduled - start
            if plan is None:
                return
            self._steps.append(DispatchedStep(plan, self.runner.execute(plan), scheduled, self.weight_version))
            self._times.dispatch += self._clock() - scheduled

    def _complete_step(self) -> list[RequestOutput]:
        """Waits for the oldest step, commits it and builds the outputs that are due."""
        step, times = self._steps[0], self._times
        start = self._clock()
        self._is_waiting = True
        result = step.pending.result()
        self._is_waiting = False
        self._steps.popleft()
        arrived = self._clock()
        accepted = self.scheduler.commit(step.plan, result)
        committed = self._clock()
        self._outputs.weight_version = self._beams.weight_version = step.weight_version
        self._drafts.learn(result.device_seconds)
        times.num_generated_tokens += self._acceptance.take(step.plan, result, accepted, step.dispatched_at, arrived)
        outputs = self._take_outputs()
        times.wait += arrived - start
        times.commit += committed - arrived
        times.output += self._clock() - committed
        times.device += result.device_seconds
        times.num_steps += 1
        return outputs

    def _take_outputs(self) -> list[RequestOutput]:
        return self._outputs.take_outputs() + self._beams.take_outputs()

    def _idle(self) -> list[RequestOutput]:
        """Nothing runs: right without requests, and with some it would be for ever, unless paused ones are in the
        way."""
        if self.has_unfinished_requests() and not self.scheduler.preempt_paused():
            raise RuntimeError(f"{self.num_unfinished_requests} requests wait, but the scheduler can run none of them")
        return []

    def _die(self, failure: BaseException) -> list[RequestOutput]:
        """Ends everything with the failure's message. The scheduler may be amid a change, so it is not asked."""
        self._failure = failure
        self._steps.clear()
        now = self._clock()
        message = f"the engine failed during a step and is dead ({describe_failure(failure)})"
        for request in self._outputs.unfinished_requests():
            request.status = RequestStatus.FINISHED
            request.finish_reason, request.stop_reason, request.error = "error", None, message
            self._outputs.finish(request, now)
        self._beams.drop_all(message, now)
        return self._take_outputs()
