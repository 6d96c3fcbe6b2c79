"""N-gram prompt lookup: what followed the last few tokens the last time they occurred (apoorvumang, "Prompt lookup
decoding", 2023). HOST: NumPy only."""

from collections.abc import Sequence

import numpy as np

from jaxinfer.engine.draft import NO_DRAFT, Draft
from jaxinfer.engine.plan import DraftOutcome
from jaxinfer.engine.request import Request
from jaxinfer.speculation.per_request import PerRequest


class NgramProposer:
    """Guesses from the request's own tokens, prompt and output. Linear in their number, a few microseconds a thousand.

    Args:
        lookup_min: at least so many tokens at the end have to have occurred before.
        lookup_max: a longer match than this is not better than one of this length; among equals the latest counts.

    Raises:
        ValueError: not 1 <= lookup_min <= lookup_max.
    """

    def __init__(self, lookup_min: int, lookup_max: int) -> None:
        if not 1 <= lookup_min <= lookup_max:
            raise ValueError(
                f"prompt_lookup_min={lookup_min} must be at least 1 and at most prompt_lookup_max={lookup_max}"
            )
        self._min, self._max = lookup_min, lookup_max
        self._tokens = PerRequest(_TokenArray)

    @property
    def num_compiled(self) -> int:
        return 0

    def warm_up(self, progress: bool) -> None:
        """There is nothing to compile."""

    def propose(self, rows: Sequence[tuple[Request, int]]) -> list[Draft]:
        """See `Proposer`."""
        return [self._draft(self._tokens[request].latest(), count) for request, count in rows]

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """It does not learn."""

    def release(self) -> None:
        """It has no device memory."""

    def restore(self) -> None:
        """It has no device memory."""

    def _draft(self, tokens: np.ndarray, count: int) -> Draft:
        found = last_match(tokens, self._min, self._max)
        return NO_DRAFT if found is None else Draft(tuple(continuation(tokens, found, count)))


def last_match(tokens: np.ndarray, shortest: int, longest: int) -> int | None:
    """Where the last tokens occurred before: the index after the match, which is the longest, and of those the latest.

    Args:
        tokens: int32[L].
        shortest, longest: length of the match.

    Returns:
        None when there is no match of `shortest` tokens.
    """
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    best = None
    for length in range(1, longest + 1):
        if length > 1:
            ends = ends[ends >= length - 1]
            ends = ends[tokens[ends - (length - 1)] == tokens[-length]] if length <= len(tokens) else ends[:0]
        if not ends.size:
            break
        best = (length, int(ends[-1]) + 1)
    return best[1] if best is not None and best[0] >= shortest else None


def continuation(tokens: np.ndarray, start: int, count: int) -> list[int]:
    """`count` tokens from `start` on. Behind the last known one it goes on with what it has given itself: what has
    recurred after L - start tokens is taken to recur after as many again."""
    period = len(tokens) - start
    return tokens[start + np.arange(count) % period].tolist()


class _TokenArray:
    """A request's tokens as a growing array: what has been there is not converted again."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._buffer = np.empty(2 * request.num_known_tokens + 64, np.int32)
        self._length = 0

    def latest(self) -> np.ndarray:
        """int32[L], all tokens known by now."""
        length = self._request.num_known_tokens
        if length > len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.empty(length, np.int32)])
        self._buffer[self._length : length] = self._request.token_ids(self._length, length)
        self._length = length
        return self._buffer[:length]
