"""Proposer: what a method of speculation is. What a draft is, and how it is verified, is the engine's."""

from collections.abc import Sequence
from typing import Protocol

from jaxinfer.engine.draft import Draft
from jaxinfer.engine.plan import DraftOutcome
from jaxinfer.engine.request import Request


class Proposer(Protocol):
    """Guesses what running requests will say next. A wrong guess costs time and changes nothing.

    A method may own compiled programs and a pool of its own, addressed by the requests' block tables: a request has
    blocks for its known tokens and for the draft that is asked for.
    """

    @property
    def num_compiled(self) -> int:
        """Programs of its own compiled so far; does not move after `warm_up`."""
        ...

    def warm_up(self, progress: bool) -> None:
        """Compiles every program of its own that it will ever run."""
        ...

    def propose(self, rows: Sequence[tuple[Request, int]]) -> Sequence[Draft]:
        """A draft for each request, of at most so many tokens of the target's vocabulary; `NO_DRAFT` where it has no
        idea. All tokens of these requests are known. Of a tree what is most likely comes first: where its first tokens
        are what holds, nothing has to be moved in the pool."""
        ...

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """What became of its latest drafts, except those of requests that ended or lost their blocks meanwhile. A draft
        may have been verified in part: `DraftOutcome.draft` is that part."""
        ...

    def release(self) -> None:
        """Gives up its device memory; nothing is proposed before `restore`."""
        ...

    def restore(self) -> None:
        """Takes it again."""
        ...
