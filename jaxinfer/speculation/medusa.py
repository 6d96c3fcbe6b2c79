"""Medusa: heads on the model's own hidden states guess several places at once (arXiv:2401.10774). HOST: NumPy only."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxinfer.cache.block_manager import PADDING_BLOCK
from jaxinfer.engine.draft import NO_DRAFT, Draft
from jaxinfer.engine.plan import DraftOutcome
from jaxinfer.engine.request import Request
from jaxinfer.speculation.candidate_tree import Choices, best_tree, shaped_tree


class MedusaSteps(Protocol):
    """The device side of the heads; see `jaxinfer.runner.medusa_runner.MedusaRunner`."""

    @property
    def num_compiled(self) -> int: ...

    def warm_up(self, progress: bool = False) -> None: ...

    def candidates(self, pages: Sequence[int], offsets: Sequence[int]) -> tuple[np.ndarray, np.ndarray]: ...


class MedusaProposer:
    """Guesses from what the model computed for the last token but one of a request: its own next token, the last one,
    is known; the heads say what comes after that. A request needs nothing of its own here, since the pool keeps what
    the heads read.

    Args:
        heads: the device side.
        block_size: S.
        choices: the shape of the trees; None takes the likeliest nodes each time.
    """

    def __init__(self, heads: MedusaSteps, block_size: int, choices: Choices | None = None) -> None:
        self._heads = heads
        self._size = block_size
        self._choices = choices

    @property
    def num_compiled(self) -> int:
        """Programs of the heads."""
        return self._heads.num_compiled

    def warm_up(self, progress: bool) -> None:
        """Compiles them."""
        self._heads.warm_up(progress)

    def propose(self, rows: Sequence[tuple[Request, int]]) -> list[Draft]:
        """See `Proposer`."""
        drafts = [NO_DRAFT] * len(rows)
        slots = [(index, *self._slot(request)) for index, (request, _) in enumerate(rows)]
        asked = [slot for slot in slots if slot[1] != PADDING_BLOCK]
        if not asked:
            return drafts
        indices, pages, offsets = zip(*asked, strict=True)
        for index, token_ids, logprobs in zip(indices, *self._heads.candidates(pages, offsets), strict=True):
            drafts[index] = self._tree(token_ids, logprobs, rows[index][1])
        return drafts

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """It does not learn."""

    def release(self) -> None:
        """It has no pool."""

    def restore(self) -> None:
        """It has no pool."""

    def _slot(self, request: Request) -> tuple[int, int]:
        """Page and offset of the last computed token; the padding block where there is none, or it is out of sight."""
        place = request.num_known_tokens - 2
        if place < 0:
            return PADDING_BLOCK, 0
        return request.block_ids[place // self._size], place % self._size

    def _tree(self, token_ids: np.ndarray, logprobs: np.ndarray, count: int) -> Draft:
        if self._choices is None:
            return best_tree(token_ids, logprobs, count)
        return shaped_tree(token_ids, logprobs, count, self._choices)
