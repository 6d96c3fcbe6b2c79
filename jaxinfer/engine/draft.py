"""Draft: what is guessed to follow a request's last token, as a chain or as a tree."""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Draft(NamedTuple):
    """Tokens guessed to follow a request's last one.

    Attributes:
        token_ids: the guesses; each is a node of a tree whose root is the request's last token.
        lane: where the device has kept the distributions that a chain was drawn from; -1 where it was certain.
        parents: for each token the index of the one that it follows, which comes before it; -1 for the root. () for a
            chain, in which each follows the one before.
    """

    token_ids: tuple[int, ...]
    lane: int = -1
    parents: tuple[int, ...] = ()

    def parent(self, index: int) -> int:
        """The index of the token that token `index` follows; -1 for the root."""
        return self.parents[index] if self.parents else index - 1

    def depths(self) -> list[int]:
        """For each token how many it is behind the root, 1 for those that follow it."""
        if not self.parents:
            return list(range(1, len(self.token_ids) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def depth(self) -> int:
        """Of the deepest token; 0 without any."""
        return max(self.depths(), default=0)

    def path(self, index: int) -> list[int]:
        """The indices of the tokens from the root to token `index`, this included; none for the root, -1."""
        path: list[int] = []
        while index >= 0:
            path.append(index)
            index = self.parent(index)
        return path[::-1]

    def guessed(self, index: int) -> list[int]:
        """The token ids of `path(index)`."""
        return [self.token_ids[node] for node in self.path(index)]

    def held(self, holds: Callable[[int, int], bool]) -> tuple[int, ...]:
        """The longest path from the root along which all tokens hold, as indices; of equals the first.

        Args:
            holds: ``(parent, token_id)``, whether this is the token that follows the parent, -1 being the root.
        """
        depths: list[int] = []
        deepest = -1
        for index, token in enumerate(self.token_ids):
            parent = self.parent(index)
            before = 0 if parent < 0 else depths[parent]
            is_right = (parent < 0 or before > 0) and holds(parent, token)
            depths.append(before + 1 if is_right else 0)
            if is_right and (deepest < 0 or depths[index] > depths[deepest]):
                deepest = index
        return tuple(self.path(deepest))

    def only(self, kept: Sequence[int]) -> "Draft":
        """The draft of some tokens, ascending indices; with a token, those before it on its path are kept."""
        if len(kept) == len(self.token_ids):
            return self
        token_ids = tuple(self.token_ids[index] for index in kept)
        if not self.parents:
            return self._replace(token_ids=token_ids)
        places = {-1: -1} | {index: place for place, index in enumerate(kept)}
        return self._replace(token_ids=token_ids, parents=tuple(places[self.parents[index]] for index in kept))

    def check(self) -> None:
        """Raises ValueError when it is no tree, or one that was drawn."""
        parents = self.parents
        if not parents:
            return
        if len(parents) != len(self.token_ids) or any(not -1 <= parent < i for i, parent in enumerate(parents)):
            raise ValueError(
                f"a draft's parents={parents} must be as many as its {len(self.token_ids)} tokens, each -1 or the "
                "index of a token before"
            )
        if self.lane >= 0:
            raise ValueError(f"a draft with parents was drawn (lane={self.lane}); only chains may be: leave lane at -1")


NO_DRAFT = Draft(())
