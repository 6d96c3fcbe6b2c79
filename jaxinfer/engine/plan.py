"""What passes between the scheduler, the runner and the commit: plans, results, and the runner's protocol."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from jaxinfer.engine.draft import NO_DRAFT, Draft
from jaxinfer.engine.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One request's share of a step: `num_tokens` new tokens at positions `start ..`.

    Attributes:
        request: whose row this is.
        start: position of the first new token; the request's `num_computed_tokens` before the step.
        num_tokens: new tokens computed, at least 1.
        samples: the last new token is the last token of the request, so the step draws the next one.
        num_scored: how many of the first new tokens need the log-probability of the prompt token that follows them
            (`prompt_logprobs`); 0 for most.
        token_on_device: the last new token is not known to the host yet; it is the slot's last drawn token.
        draft: tokens guessed to follow the request's last one. They are among the new tokens, behind it, and the step
            draws the token after it and the token after each of them. Of a tree each token is computed at the position
            that it would have, sees no others of the tree than those on its path, and keeps its key and value in the
            KV slot of its index.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    num_scored: int = 0
    token_on_device: bool = False
    draft: Draft = NO_DRAFT

    @property
    def num_logits(self) -> int:
        """Logits rows that it needs."""
        return self.num_scored + (1 + len(self.draft.token_ids) if self.samples else 0)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: rows in execution order, decodes before prefill chunks.

    Attributes:
        rows: what is computed.
        num_tokens: tokens of all rows.
        copies: blocks (source, target) that are copied in this order before the step writes anything.
        moves: KV slots (source, target), ``block * block_size + offset`` each, of which the former's contents go to
            the latter, before the copies: tokens of trees that held, to where they would have been computed. All of a
            request's sources may be read before any target is written, and each target lies before its source.
    """

    rows: tuple[ScheduledRow, ...]
    num_tokens: int
    copies: tuple[tuple[int, int], ...] = ()
    moves: tuple[tuple[int, int], ...] = ()

    @property
    def has_drafts(self) -> bool:
        return any(row.draft.token_ids for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Raw-model log-softmax of some logits rows, as numpy arrays; Q rows, k alternatives.

    Attributes:
        token_ids: int32[Q, k], the k best ids, best first.
        logprobs: float32[Q, k], their log-probabilities.
        target_logprobs: float32[Q], of the sampled token (or of the prompt token that follows).
        target_ranks: int32[Q], its 1-based rank.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    target_logprobs: np.ndarray
    target_ranks: np.ndarray


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one row of the plan brought back.

    Attributes:
        token_id: the drawn token, or None when the row does not sample.
        finite: False when the row's logits hold NaN or infinity.
        logprobs: one entry for the drawn token when the request asks for `logprobs`, else None.
        prompt_logprobs: `num_scored` entries when the request asks for `prompt_logprobs`, else None.
        allowed: False when bans (allow-list, bad words, minimum length) left no token to draw.
        following: of a row with a draft, the results after each of its tokens, each on condition that the draft is
            right on the path to there. From `Scheduler.commit` on, only those that hold, in the order of the path.
    """

    token_id: int | None
    finite: bool = True
    logprobs: RowLogprobs | None = None
    prompt_logprobs: RowLogprobs | None = None
    allowed: bool = True
    following: tuple["RowResult", ...] = ()

    def is_token(self, token_id: int) -> bool:
        """The row drew this token, and nothing was wrong."""
        return self.token_id == token_id and self.finite and self.allowed

    @property
    def drawn_or_none(self) -> int:
        """The token that was drawn; -1 where none could be, or none was asked for."""
        return self.token_id if self.token_id is not None and self.finite and self.allowed else -1

    @property
    def drawn(self) -> int:
        """The token of a row that samples; ValueError when it brought none."""
        if self.token_id is None:
            raise ValueError("a row that samples brought back no token")
        return self.token_id


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of the plan's rows, and the time the device was busy with the step, in seconds."""

    rows: tuple[RowResult, ...]
    device_seconds: float


class UncommittedStep(NamedTuple):
    """A step in flight, with the allocated KV slots at its start and the tokens that fill them at its end."""

    plan: StepPlan
    num_slots: int
    num_tokens: int


class DraftOutcome(NamedTuple):
    """What became of a draft.

    Attributes:
        request: whose it was; it may have ended with the step.
        draft: what was verified: what the method proposed, or a part of it.
        path: the indices of its tokens that hold, from the root on; of a chain, its first ones.
        drawn: what the model drew after the root and after each token of the draft, right or wrong: ``drawn[1 + i]``
            follows token i and what is before it on its path. -1 where nothing could be drawn.
    """

    request: Request
    draft: Draft
    path: tuple[int, ...]
    drawn: tuple[int, ...]

    @property
    def num_accepted(self) -> int:
        """Tokens that hold."""
        return len(self.path)

    @property
    def num_drafted(self) -> int:
        """Tokens that were verified."""
        return len(self.draft.token_ids)


class Speculation(Protocol):
    """Whoever guesses, as the engine sees it; see `jaxinfer.speculation`."""

    @property
    def num_compiled(self) -> int:
        """Programs of its own compiled so far."""
        ...

    def length(self, request: Request) -> int:
        """How many tokens are to be guessed for this request next, at least 1."""
        ...

    def propose(self, rows: Sequence[tuple[Request, int]]) -> Sequence[Draft]:
        """A draft for each of these requests, of at most so many tokens, all branches of a tree together; `NO_DRAFT`
        where there is none. No step is in flight, the request lacks one token, and it has blocks for that and the
        draft."""
        ...

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """What became of the drafts of a step, in no order."""
        ...


class PendingStep(Protocol):
    """A step that was dispatched; `result` waits for it and makes the one device-to-host copy."""

    def is_ready(self) -> bool:
        """`result` would not wait."""
        ...

    def result(self) -> StepResult: ...


class DispatchedStep(NamedTuple):
    """A step that was handed to the device at a time, with parameters of this version."""

    plan: StepPlan
    pending: PendingStep
    dispatched_at: float
    weight_version: int


class Runner(Protocol):
    """The device side as the engine sees it."""

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far; does not move after warm-up."""
        ...

    def change(self, copies: Sequence[tuple[int, int]], moves: Sequence[tuple[int, int]]) -> None:
        """Dispatches what a plan would have it do to the pool before its step (`StepPlan`), without a step."""
        ...

    def execute(self, plan: StepPlan) -> PendingStep:
        """Dispatches a step without waiting for it. Steps run in the order of the calls."""
        ...
