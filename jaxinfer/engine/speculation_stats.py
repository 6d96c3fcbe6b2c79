"""SpeculationStats: how many guesses were right, and what they cost."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass(slots=True)
class SpeculationStats:
    """Counts and times of an engine, or of one request with all its samples.

    Attributes:
        num_drafts: drafts verified: a request with one in a step counts once.
        num_draft_tokens: tokens in them, of trees all branches.
        num_accepted_tokens: how many of these were right.
        num_drafted_per_position: of the drafts, those with a first token, with a second, and so on.
        num_accepted_per_position: in how many of these a token there was right.
        num_verify_steps: steps with drafts.
        draft_seconds: wall time of guessing. One guess is for several requests, and counts in full for each.
        verify_seconds: the device's time for steps with drafts; likewise.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_drafted_per_position: list[int] = field(default_factory=list)
    num_accepted_per_position: list[int] = field(default_factory=list)
    num_verify_steps: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    def add(self, num_accepted: int, num_drafted: int, depth: int) -> None:
        """Counts a draft of `num_drafted` tokens, `depth` of them one after the other at most (all, in a chain), of
        which the first `num_accepted` on a path were right."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        missing = depth - len(self.num_drafted_per_position)
        self.num_drafted_per_position += [0] * missing
        self.num_accepted_per_position += [0] * missing
        for position in range(depth):
            self.num_drafted_per_position[position] += 1
            self.num_accepted_per_position[position] += position < num_accepted

    @property
    def acceptance_length(self) -> float:
        """Tokens that a verified draft brought on average, the one drawn after it included; 1 without drafts."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

    @property
    def acceptance_rate(self) -> float:
        """Share of the guessed tokens that were right, 0 to 1."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """The same for the first token of a draft, the second, and so on: right only when all before it are."""
        pairs = zip(self.num_accepted_per_position, self.num_drafted_per_position, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]


def sum_of_speculation(parts: Sequence[SpeculationStats]) -> SpeculationStats:
    """The statistics of several engines together."""

    def by_position(lists: Sequence[Sequence[int]]) -> list[int]:
        return [sum(counts) for counts in zip_longest(*lists, fillvalue=0)]

    return SpeculationStats(
        num_drafts=sum(part.num_drafts for part in parts),
        num_draft_tokens=sum(part.num_draft_tokens for part in parts),
        num_accepted_tokens=sum(part.num_accepted_tokens for part in parts),
        num_drafted_per_position=by_position([part.num_drafted_per_position for part in parts]),
        num_accepted_per_position=by_position([part.num_accepted_per_position for part in parts]),
        num_verify_steps=sum(part.num_verify_steps for part in parts),
        draft_seconds=sum(part.draft_seconds for part in parts),
        verify_seconds=sum(part.verify_seconds for part in parts),
    )
