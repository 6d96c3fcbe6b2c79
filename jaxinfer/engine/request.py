"""A request: its tokens, its counters, its place in the pool."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxinfer.engine.draft import NO_DRAFT, Draft
from jaxinfer.engine.sampling_params import SamplingParams


class Scoring(NamedTuple):
    """What a request that only scores its tokens asks for beside `prompt_logprobs`; its one draw is thrown away.

    Attributes:
        start: index of the first token that is scored, at least 1.
        temperature: the logits are divided by it; above 0.
        last_token: the id whose log-probability after the whole prompt is wanted.
    """

    start: int
    temperature: float
    last_token: int


class RequestStatus(enum.Enum):
    """Where a request is in its life: waiting -> running (-> waiting when preempted) -> finished."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """One sequence being generated. `num_computed_tokens` chases `num_tokens`; when it has caught up a token is drawn.

    With one step in flight the counters are optimistic: a drawn token that the host has not seen counts in
    `num_tokens` (through `num_inflight`), and `num_computed_tokens` includes what is scheduled.

    Attributes:
        request_id: unique among unfinished requests.
        prompt_token_ids: the prompt, at least one id.
        params: how to sample.
        arrival_time: seconds on the engine's clock.
        max_total_tokens: the request ends with "length" when prompt plus output reach this; at most max_model_len.
        eos_token_ids: ids that end the request with "stop" (empty under `ignore_eos`).
        seed: 64-bit key of the request's randomness: `params.seed`, or drawn by the engine.
        child_index: which of the `n` samples of one prompt this is.
        priority: lower runs first under the "priority" policy.
        cache_salt: only requests with the same salt find each other's blocks in the prefix cache.
        is_synchronous: the host changes its tokens between two steps (beam search), so no step may run ahead of it.
        output_token_ids: tokens drawn and committed.
        num_computed_tokens: tokens whose K and V are in the pool or will be after the steps in flight.
        num_inflight: drawn tokens the host has not seen: 0 or 1, and 2 between scheduling a step and committing the one
            before it. The token a step draws counts as soon as the step is scheduled.
        draft: what is guessed to follow its last token; verified by the next step.
        block_ids: the request's block table. Others may own the same blocks; who writes has one of its own.
        block_keys: keys of its first full blocks in the prefix cache, as many as were needed so far.
        num_published: its first full blocks that the cache knows, or need not know.
        is_findable: what it computes may be put into the prefix cache.
        num_cached_tokens: prompt tokens that were in the pool already when it was to compute them for the first time.
        siblings: all samples of its prompt, itself included; empty when it is alone.
        followers: siblings that wait until it has computed the prompt.
        is_paused: between the scheduler's `pause` and `resume`: it computes nothing and is not in the queue.
        slot: row of the per-request device state while running, else -1.
        order: place among all requests, set by the scheduler; the smaller goes first.
        admission: counts admissions (above 1 after a preemption); device state of an earlier one is stale.
        finish_reason: "stop", "length", "abort" or "error" once finished.
        stop_reason: the stop string or stop token id that ended it, None for EOS.
        error: the message of a request that ended with "error".
        scoring: of a request that only scores its tokens; None for others.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    max_total_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    child_index: int = 0
    priority: int = 0
    cache_salt: str | None = None
    is_synchronous: bool = False
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_inflight: int = 0
    draft: Draft = NO_DRAFT
    block_ids: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    num_published: int = 0
    is_findable: bool = True
    num_cached_tokens: int = 0
    siblings: Sequence["Request"] = ()
    followers: list["Request"] = field(default_factory=list)
    is_paused: bool = False
    slot: int = -1
    order: tuple[int, float, int] = (0, 0.0, 0)
    admission: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    scoring: Scoring | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Prompt plus committed output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens drawn so far, the one still on the device included."""
        return len(self.output_token_ids) + self.num_inflight

    @property
    def num_tokens(self) -> int:
        """Prompt plus drawn tokens, the one still on the device included."""
        return len(self.prompt_token_ids) + self.num_output_tokens

    @property
    def reads_cache(self) -> bool:
        """See `SamplingParams.reads_cache`."""
        return self.params.reads_cache

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def twin(
        self, request_id: str, *, output_token_ids: Sequence[int] | None = None, child_index: int | None = None
    ) -> "Request":
        """A new request like this one, for `Scheduler.fork`: the same prompt, parameters, limits, seed and arrival.

        Args:
            request_id: of the twin.
            output_token_ids: its committed output; None takes this one's.
            child_index: which random draws it makes; None takes this one's, and so the same draws.
        """
        return Request(
            request_id=request_id,
            prompt_token_ids=self.prompt_token_ids,
            params=self.params,
            arrival_time=self.arrival_time,
            max_total_tokens=self.max_total_tokens,
            eos_token_ids=self.eos_token_ids,
            seed=self.seed,
            child_index=self.child_index if child_index is None else child_index,
            priority=self.priority,
            cache_salt=self.cache_salt,
            is_synchronous=self.is_synchronous,
            output_token_ids=list(self.output_token_ids if output_token_ids is None else output_token_ids),
        )

    def num_common(self, other: "Request") -> int:
        """How many tokens both begin with, as far as the host knows them."""
        count = min(self.num_known_tokens, other.num_known_tokens)
        own, others = self.token_ids(0, count), other.token_ids(0, count)
        if own == others:
            return count
        return next(index for index in range(count) if own[index] != others[index])

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Known tokens at positions `start .. stop - 1` (prompt, then committed output)."""
        num_prompt = len(self.prompt_token_ids)
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - num_prompt]
