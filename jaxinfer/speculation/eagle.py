"""EAGLE: a head of one layer guesses a tree from the target's own hidden states. HOST: plain integers."""

from collections.abc import Sequence
from typing import Any, Protocol

from jaxinfer.engine.draft import Draft
from jaxinfer.engine.plan import DraftOutcome
from jaxinfer.engine.request import Request


class EagleLoop(Protocol):
    """The device side; see `jaxinfer.runner.eagle_runner.EagleRunner`. Trees are arrays that have `tolist`."""

    @property
    def num_compiled(self) -> int: ...

    def warm_up(self, progress: bool = False) -> None: ...

    def draft(self, requests: Sequence[Request]) -> Any: ...


class EagleProposer:
    """Proposes the best nodes of each request's tree: as many as are asked for, since a tree's first nodes are a tree.

    It has nothing of its own on the device but the head's parameters: what the head knows of a request lies in the
    request's blocks, in the target's pool.

    Args:
        loop: the device side.
        is_chain: the trees have one branch.
    """

    def __init__(self, loop: EagleLoop, is_chain: bool) -> None:
        self._loop = loop
        self._is_chain = is_chain

    @property
    def num_compiled(self) -> int:
        """Programs of the loop."""
        return self._loop.num_compiled

    def warm_up(self, progress: bool) -> None:
        """Compiles them."""
        self._loop.warm_up(progress)

    def propose(self, rows: Sequence[tuple[Request, int]]) -> list[Draft]:
        """See `Proposer`."""
        trees = self._loop.draft([request for request, _ in rows])
        drafts = []
        for (_, count), token_ids, parents in zip(rows, trees.token_ids.tolist(), trees.parents.tolist(), strict=True):
            drafts.append(Draft(tuple(token_ids[:count]), parents=() if self._is_chain else tuple(parents[:count])))
        return drafts

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """It does not learn."""

    def release(self) -> None:
        """The pool is the target's."""

    def restore(self) -> None:
        """The pool is the target's."""
