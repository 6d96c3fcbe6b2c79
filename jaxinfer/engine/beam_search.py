"""Beam search over one prompt: arithmetic on the candidates that a model gives. HOST, plain numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Candidates(NamedTuple):
    """The best continuations of one beam.

    Attributes:
        token_ids: best first.
        logprobs: log-probability of each.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]


_NO_CANDIDATES = Candidates((), ())


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A sequence of generated tokens, as its last token and the beam that it continues; the empty one has no parent.

    Attributes:
        parent: all but the last token.
        token_id: the last token.
        logprob: its log-probability.
        candidates: the best continuations that the parent had.
        cum_logprob: sum over all tokens.
        length: tokens.
        ends: the last token is an end-of-sequence id.
    """

    parent: "Beam | None" = None
    token_id: int = -1
    logprob: float = 0.0
    candidates: Candidates = _NO_CANDIDATES
    cum_logprob: float = 0.0
    length: int = 0
    ends: bool = False

    def path(self) -> list["Beam"]:
        """The beams from the one with the first token to this one."""
        path = [self]
        while path[-1].length > 1 and (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1] if self.length else []

    @property
    def token_ids(self) -> list[int]:
        return [beam.token_id for beam in self.path()]


class Continuation(NamedTuple):
    """A beam that goes on: the index of the one it continues among those of the step before, and its new token."""

    parent_index: int
    token_id: int


class BeamSearch:
    """Keeps the best `beam_width` sequences, a token a step, and collects those that end.

    It is transformers' beam search with early_stopping=False: sequences are compared by
    ``sum of log-probabilities / length ** length_penalty``, the end counted in the length. Of all continuations of all
    beams the best `beam_width` that do not end go on; one that ends is kept if it is among the best `beam_width` of
    all, and the best `beam_width` of those kept are returned. The search is done when as many are kept and the best
    beam that goes on, by its score as if it ended now, is no better than the worst of them; or at `max_tokens`. Ties
    go to the better beam, then to the better candidate.

    Args:
        beam_width: at least 1.
        max_tokens: at least 1.
        length_penalty: as in `BeamSearchParams`.
        end_ids: ids that end a sequence.
    """

    def __init__(self, beam_width: int, max_tokens: int, length_penalty: float, end_ids: frozenset[int]) -> None:
        self.beam_width = beam_width
        self.max_tokens = max_tokens
        self.length_penalty = length_penalty
        self.end_ids = end_ids
        self.beams: list[Beam] = [Beam()]
        """Those that go on, best first; at the start the empty one."""
        self.is_done = False
        self._kept: list[Beam] = []

    @property
    def num_candidates(self) -> int:
        """How many candidates of each beam decide all that there is to decide, if the vocabulary has as many."""
        return self.beam_width + len(self.end_ids)

    def advance(self, candidates: Sequence[Candidates]) -> list[Continuation]:
        """Takes one step.

        Args:
            candidates: for each of `beams` its best `num_candidates` continuations, or more.

        Returns:
            One for each of the new `beams`, in their order; none when the search is done.
        """
        ranked = self._ranked(candidates)
        is_last = ranked[0][1].length >= self.max_tokens
        for _, beam in ranked[: self.beam_width]:
            if beam.ends or is_last:
                self._kept.append(beam)
        self._kept.sort(key=self.score, reverse=True)  # stable: what was there first stays ahead
        del self._kept[self.beam_width :]
        going_on = [] if is_last else [entry for entry in ranked if not entry[1].ends][: self.beam_width]
        self.beams = [beam for _, beam in going_on]
        self.is_done = not self.beams or self._cannot_improve()
        if self.is_done:
            self.beams = []
            return []
        return [Continuation(index, beam.token_id) for index, beam in going_on]

    def best(self) -> list[Beam]:
        """The sequences found so far, best first, at most `beam_width`; once done these are the results."""
        return list(self._kept)

    def score(self, beam: Beam) -> float:
        """What sequences are compared by."""
        return float(beam.cum_logprob / beam.length**self.length_penalty)

    def _ranked(self, candidates: Sequence[Candidates]) -> list[tuple[int, Beam]]:
        """The most likely continuations with their parents' indices, so many that enough of them do not end."""
        totals = []
        for index, (parent, given) in enumerate(zip(self.beams, candidates, strict=True)):
            totals += [(-parent.cum_logprob - logprob, index, rank) for rank, logprob in enumerate(given.logprobs)]
        totals.sort()
        best = totals[: self.beam_width * (1 + len(self.end_ids))]
        return [(index, self._continued(self.beams[index], candidates[index], rank)) for _, index, rank in best]

    def _continued(self, parent: Beam, given: Candidates, rank: int) -> Beam:
        token_id, logprob = given.token_ids[rank], given.logprobs[rank]
        total, ends = parent.cum_logprob + logprob, token_id in self.end_ids
        return Beam(parent, token_id, logprob, given, total, parent.length + 1, ends)

    def _cannot_improve(self) -> bool:
        return len(self._kept) == self.beam_width and self.score(self.beams[0]) <= self.score(self._kept[-1])
