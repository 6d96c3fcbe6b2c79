"""NgramPool: what has followed each token, the latest of it. HOST: plain integers."""

from collections import OrderedDict
from collections.abc import Sequence


class NgramPool:
    """N-grams by their first token. Of each first token the `size` that were added last are kept.

    Args:
        size: n-grams for each first token.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._tails: dict[int, OrderedDict[tuple[int, ...], None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Adds an n-gram, or notes that it was seen again."""
        tails = self._tails.setdefault(ngram[0], OrderedDict())
        tail = tuple(ngram[1:])
        tails[tail] = None
        tails.move_to_end(tail)
        if len(tails) > self._size:
            tails.popitem(last=False)

    def add_text(self, token_ids: Sequence[int], length: int) -> None:
        """Adds all n-grams of `length` tokens of a text."""
        for start in range(len(token_ids) - length + 1):
            self.add(token_ids[start : start + length])

    def after(self, token_id: int) -> list[tuple[int, ...]]:
        """What followed a token, the latest first."""
        return list(reversed(self._tails.get(token_id, ())))
