"""The token budget: how the prefill tokens of a step are shared out. Arithmetic on plain integers."""

from bisect import bisect_left
from collections.abc import Sequence


class TokenBudget:
    """Shares tokens over requests that are offered one after the other, the best first.

    A request gets all it wants when that is left. One that does not fit, but would within two steps, takes what is
    left, as in a plain queue. One that would go on for longer gets half of what is left while others come behind it,
    so that a short prompt overtakes a long one without stopping it; what nobody behind wanted goes to it in the end.

    Args:
        num_tokens: tokens to share.
        min_chunk: a smaller share is not worth a row: only the first request, or one that it completes, gets it.
    """

    def __init__(self, num_tokens: int, min_chunk: int) -> None:
        self.left = num_tokens
        self._min_chunk = min_chunk
        self._wants: list[int] = []
        self._grants: list[int] = []

    def offer(self, want: int, is_last: bool) -> int:
        """The first share of the next request, 0 to `want` tokens; `finish` may add to it, but not to 0.

        Args:
            want: tokens the request could compute now, at least 1.
            is_last: nobody is offered tokens after it. Saying False wrongly does no harm.
        """
        if want <= self.left:
            grant = want
        elif is_last or want <= 2 * self.left:
            grant = self.left
        else:
            grant = min(max(self.left // 2, self._min_chunk), self.left)
        if grant < min(want, self._min_chunk) and self._wants:
            grant = 0
        self._wants.append(want)
        self._grants.append(grant)
        self.left -= grant
        return grant

    def finish(self) -> list[int]:
        """Every request's share, in the order of the offers."""
        for index, grant in enumerate(self._grants):
            if grant:
                extra = min(self.left, self._wants[index] - grant)
                self._grants[index] += extra
                self.left -= extra
        return self._grants


def share_tokens(wants: Sequence[int], num_tokens: int, min_chunk: int) -> list[int]:
    """The shares of requests that are all known beforehand; see `TokenBudget`."""
    budget = TokenBudget(num_tokens, min_chunk)
    for index, want in enumerate(wants):
        budget.offer(want, is_last=index + 1 == len(wants))
    return budget.finish()


def trimmed_total(num_tokens: int, num_decodes: int, buckets: Sequence[int]) -> int:
    """The step size to aim at: `num_tokens`, or the next lower bucket.

    The lower one is chosen when padding to the next higher would waste more than a quarter of it, and at least half
    of the prefill tokens (those beyond `num_decodes`) stay, so that no prompt takes more than twice the steps for it.

    Args:
        num_tokens: tokens of the step, at most the last bucket.
        num_decodes: how many of them are decodes, which cannot be left out.
        buckets: compiled step sizes, ascending; empty when every size is.
    """
    index = bisect_left(buckets, num_tokens)
    if not 0 < index < len(buckets) or 4 * (buckets[index] - num_tokens) <= buckets[index]:
        return num_tokens
    lower = buckets[index - 1]
    return lower if 2 * (lower - num_decodes) >= num_tokens - num_decodes else num_tokens
