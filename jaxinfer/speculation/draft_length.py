"""How many tokens are worth guessing, from how many were right so far."""

import math

WORTH_WHILE = 0.25
"""A token is guessed while all of the draft up to it is right with at least this probability."""
FIRST_GUESS = 3
_DECAY = 0.85


class DraftLength:
    """Adapts the length of one request's drafts: it guesses n tokens when `rate ** n` is at least `WORTH_WHILE`, where
    `rate` is the share of tried tokens that were right, recent ones counting more; never less than one, so that it
    notices when guesses become better.

    Args:
        longest: tokens of a draft at most.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        # As if some drafts had been seen that make FIRST_GUESS the length.
        self._tried = 2.0
        self._right = 2.0 * WORTH_WHILE ** (1.0 / (FIRST_GUESS + 0.5))

    @property
    def rate(self) -> float:
        """Share of the tried tokens that were right."""
        return self._right / self._tried

    def tokens(self) -> int:
        """The length of the next draft."""
        if self.rate <= WORTH_WHILE:
            return 1
        if self.rate >= 1.0:
            return self._longest
        return max(1, min(self._longest, int(math.log(WORTH_WHILE) / math.log(self.rate))))

    def learn(self, num_right: int, num_drafted: int) -> None:
        """Of a draft of `num_drafted` tokens the first `num_right` were right; behind a wrong one none was tried."""
        self._tried = _DECAY * self._tried + min(num_right + 1, num_drafted)
        self._right = _DECAY * self._right + num_right
