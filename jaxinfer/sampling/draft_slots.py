"""DraftSlots: what a draft model's sampler needs of the requests it guesses for. HOST: NumPy only."""

from collections.abc import Sequence

import numpy as np

from jaxinfer.engine.plan import ScheduledRow
from jaxinfer.engine.request import Request
from jaxinfer.sampling.batch import DRAWS, FIELD, NUM_FIELDS
from jaxinfer.sampling.rejection import DRAFT_STREAM
from jaxinfer.sampling.slots import request_column


class DraftSlots:
    """Gathers the rows of a draft step.

    A request with a seed has its draft drawn with the very noise that its own token will be drawn with: where the two
    models agree, so do the tokens. A request without one has its draft drawn independently of that, for rejection
    sampling. Penalties, biases and bans are the target's business.

    Args:
        num_slots: C.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._columns = np.zeros((NUM_FIELDS, num_slots), np.int32)
        self._owners: list[Request | None] = [None] * num_slots

    def prepare(self, rows: Sequence[ScheduledRow], places: Sequence[int], num_rows: int) -> np.ndarray:
        """int32[NUM_FIELDS + 1, R]: the fields of `SamplingBatch` for the rows that draw, padded, and below them where
        the distribution of each is to be kept.

        Args:
            rows: of the step.
            places: for each row that draws.
            num_rows: R.
        """
        drawing = [row for row in rows if row.samples]
        packed = np.zeros((NUM_FIELDS + 1, num_rows), np.int32)
        packed[FIELD["slot"]] = self._num_slots
        packed[NUM_FIELDS] = np.iinfo(np.int32).max
        used = len(drawing)
        slots = [row.request.slot for row in drawing]
        for row, slot in zip(drawing, slots, strict=True):
            if self._owners[slot] is not row.request:
                self._owners[slot] = row.request
                self._columns[:, slot] = _column(row.request)
        packed[:NUM_FIELDS, :used] = self._columns[:, slots]
        packed[FIELD["slot"], :used] = slots
        packed[FIELD["target"], :used] = DRAWS
        packed[FIELD["position"], :used] = [row.start + row.num_tokens for row in drawing]
        packed[NUM_FIELDS, :used] = places
        return packed


def draws_by_rejection(request: Request) -> bool:
    """Its drafts are drawn independently of its own tokens, and accepted by rejection sampling."""
    return not request.params.is_greedy and request.params.seed is None


def _column(request: Request) -> np.ndarray:
    column = request_column(request, keeps_counts=False)
    column[FIELD["want_logprobs"]] = 0
    if draws_by_rejection(request):
        column[FIELD["seed_hi"]] ^= DRAFT_STREAM
    return column
