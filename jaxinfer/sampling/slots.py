"""SlotTable: the host's copy of what each slot's request asks of the sampler, from which a step's rows are gathered."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxinfer.engine.plan import ScheduledRow
from jaxinfer.engine.request import Request
from jaxinfer.sampling.batch import DRAWS, FIELD, FLOAT_FIELDS, NUM_FIELDS, VERIFIES
from jaxinfer.sampling.bias import (
    BiasKey,
    bias_key,
    bias_row,
    counts_row,
    has_changing_bias,
    has_penalties,
    has_static_bias,
)
from jaxinfer.sampling.draft_rows import num_packed_rows
from jaxinfer.sampling.state import COUNTS_A_CALL

_EMPTY = np.zeros((NUM_FIELDS, 0), np.int32)
_PER_ROW = [FIELD[name] for name in ("slot", "target", "position")]


@dataclass(frozen=True, slots=True)
class SlotInputs:
    """What the sampler needs for one step.

    Attributes:
        packed: int32[NUM_FIELDS, R], for `SamplingBatch.unpack`, and where there are drafts below it the matrix for
            `DraftRows.unpack`. The logits rows of the step in plan order: of each scheduled row first its scored
            positions, then its draw, then the draws behind each token of its draft; then padding.
        bias_uploads: (slot, float32[V]) that must be on the device before the step.
        counts_uploads: (slot, int32[V]) likewise.
        counted: (slot, token) that are to be counted before the step.
        needs_sampler: False when every row is a plain greedy draw, so that `sample_greedy` does.
    """

    packed: np.ndarray
    bias_uploads: list[tuple[int, np.ndarray]]
    counts_uploads: list[tuple[int, np.ndarray]]
    counted: list[tuple[int, int]]
    needs_sampler: bool


class SlotTable:
    """Remembers which request each slot serves and its sampling constants. HOST: numpy only.

    Args:
        num_slots: C.
        vocab_size: V.
        custom_processors: there are custom logits processors, which act on every row and may read the counts: all
            rows then need the sampler and keep counts.
        num_drafts: K, tokens of a draft that follow one another, at most; 0 for no drafts.
        keeps_probabilities: drafts may be drawn.
        is_typical: a lossy rule decides what holds of drafts.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        custom_processors: bool = False,
        num_drafts: int = 0,
        keeps_probabilities: bool = False,
        is_typical: bool = False,
    ) -> None:
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        self.custom_processors = custom_processors
        self._constants = np.zeros((NUM_FIELDS, num_slots), np.int32)
        self._needs_sampler = np.zeros(num_slots, bool)
        self._score_factors = np.zeros(num_slots, np.float32)
        self._owners: list[tuple[Request, int] | None] = [None] * num_slots
        self._bias_keys: list[BiasKey | None] = [None] * num_slots
        self._watched: set[int] = set()
        self._num_drafts = num_drafts
        self._draft_fields = num_packed_rows(num_drafts, keeps_probabilities, is_typical)
        self._is_typical = is_typical
        self._num_counted: dict[int, int] = {}

    def prepare(self, rows: Sequence[ScheduledRow], num_rows: int) -> SlotInputs:
        """The sampler's inputs for a plan's rows, padded to `num_rows` logits rows (R).

        Raises:
            ValueError: the plan has more logits rows than `num_rows`, or a bad word of several tokens would have to
                be matched against a token that is still on the device.
        """
        slots: list[int] = []
        targets: list[int] = []
        positions: list[int] = []
        drafted: list[tuple[int, ScheduledRow]] = []
        inputs = SlotInputs(_EMPTY, [], [], [], False)
        for row in rows:
            request = row.request
            slot = request.slot
            owner = self._owners[slot]
            if owner is None or owner[0] is not request or owner[1] != request.admission:
                self._admit(request, inputs.counts_uploads)
            if row.num_scored:
                first = row.start + 1
                slots += [slot] * row.num_scored
                targets += request.prompt_token_ids[first : first + row.num_scored]
                positions += range(first, first + row.num_scored)
            if row.samples:
                num_drafted = len(row.draft.token_ids)
                position = row.start + row.num_tokens - num_drafted
                if slot in self._watched:
                    self._refresh_bias(row, position, inputs.bias_uploads)
                if slot in self._num_counted:
                    self._count(row, inputs.counted)
                if num_drafted:
                    drafted.append((len(slots), row))
                kind = request.scoring.last_token if request.scoring else VERIFIES if num_drafted else DRAWS
                slots += [slot] * (1 + num_drafted)
                targets += [kind] * (1 + num_drafted)
                positions.append(position)
                positions += [position + depth for depth in row.draft.depths()]
        needs_sampler = self.custom_processors or bool(self._needs_sampler[slots].any())
        packed = self._pack(slots, targets, positions, num_rows)
        if self._num_drafts and needs_sampler:
            self._pack_drafts(packed, drafted)
        return replace(inputs, packed=packed, needs_sampler=needs_sampler)

    def _pack(self, slots: list[int], targets: list[int], positions: list[int], num_rows: int) -> np.ndarray:
        used = len(slots)
        if used > num_rows:
            raise ValueError(f"num_rows={num_rows} is less than the {used} logits rows of the plan")
        packed = np.zeros((NUM_FIELDS + self._draft_fields, num_rows), np.int32)
        packed[FIELD["slot"], used:] = self.num_slots
        packed[:NUM_FIELDS, :used] = self._constants[:, slots]
        packed[_PER_ROW, :used] = (slots, targets, positions)
        scored = np.flatnonzero(packed[FIELD["target"], :used] >= 0)
        if scored.size:
            self._make_scoring(packed, scored)
        return packed

    def _pack_drafts(self, packed: np.ndarray, drafted: Sequence[tuple[int, ScheduledRow]]) -> None:
        """Fills in what is below the fields of SamplingBatch: for each logits row the tokens before it."""
        packed[NUM_FIELDS:] = -1
        for first, row in drafted:
            draft, prefix = row.draft.token_ids, packed[NUM_FIELDS : NUM_FIELDS + self._num_drafts]
            for index, (token, depth) in enumerate(zip(draft, row.draft.depths(), strict=True)):
                prefix[: depth - 1, first + 1 + index] = prefix[: depth - 1, first + 1 + row.draft.parent(index)]
                prefix[depth - 1, first + 1 + index] = token
            if row.draft.lane >= 0:
                place = row.draft.lane * self._num_drafts
                packed[NUM_FIELDS + self._num_drafts, first : first + len(draft)] = draft
                packed[NUM_FIELDS + self._num_drafts + 1, first : first + len(draft)] = range(place, place + len(draft))
            if self._is_typical:
                parents, tokens = packed[NUM_FIELDS + self._num_drafts :]
                parents[first + 1 : first + 1 + len(draft)] = [
                    first + 1 + row.draft.parent(index) for index in range(len(draft))
                ]
                tokens[first + 1 : first + 1 + len(draft)] = draft
            if row.request.slot in self._watched:
                for index, key in enumerate(_bias_keys(row, row.start + 1)):
                    packed[FIELD["use_bias"], first + index] = key is not None

    def _count(self, row: ScheduledRow, counted: list[tuple[int, int]]) -> None:
        """What the device has not counted: tokens that were guessed and are committed now. A token that is drawn
        without a guess it counts by itself."""
        request, slot = row.request, row.request.slot
        fresh = request.output_token_ids[self._num_counted[slot] :]
        counted += [(slot, token) for token in fresh]
        self._num_counted[slot] += len(fresh) + (not row.draft.token_ids)

    def _make_scoring(self, packed: np.ndarray, scored: np.ndarray) -> None:
        """Scored rows write nothing, are not processed, and want logprobs even if the request's draws do not."""
        slots = packed[FIELD["slot"]].copy()
        for name, value in (("slot", self.num_slots), ("temperature", 0), ("use_bias", 0), ("use_counts", 0)):
            packed[FIELD[name], scored] = value
        packed[FIELD["want_logprobs"], scored] = 1
        packed[FIELD["temperature"], scored] = self._score_factors[slots[scored]].view(np.int32)

    def _admit(self, request: Request, counts_uploads: list[tuple[int, np.ndarray]]) -> None:
        """Takes note of the request that has this slot now; an earlier admission's device state is stale."""
        params, slot = request.params, request.slot
        keeps_counts = self.custom_processors or has_penalties(params)
        self._owners[slot] = (request, request.admission)
        self._bias_keys[slot] = None
        self._constants[:, slot] = request_column(request, keeps_counts)
        self._needs_sampler[slot] = params.needs_sampler
        scoring = request.scoring
        self._score_factors[slot] = 0.0 if scoring is None or scoring.temperature == 1.0 else 1 / scoring.temperature
        if has_static_bias(params) or has_changing_bias(params):
            self._watched.add(slot)
        else:
            self._watched.discard(slot)
        self._num_counted.pop(slot, None)
        if keeps_counts:
            counts_uploads.append((slot, counts_row(request, self.vocab_size)))
            if self._num_drafts:
                self._num_counted[slot] = len(request.output_token_ids)

    def _refresh_bias(self, row: ScheduledRow, position: int, bias_uploads: list[tuple[int, np.ndarray]]) -> None:
        """The one bias of the draws from `position` to behind the draft; some of them may have none."""
        key = next((key for key in _bias_keys(row, position) if key is not None), None)
        request, slot = row.request, row.request.slot
        self._constants[FIELD["use_bias"], slot] = key is not None
        if key is not None and key != self._bias_keys[slot]:
            bias_uploads.append((slot, bias_row(request, key, self.vocab_size)))
            self._bias_keys[slot] = key


def _bias_keys(row: ScheduledRow, position: int) -> Iterator[BiasKey | None]:
    """Of the draw at `position`, and of those behind each token of the row's draft."""
    for index in range(-1, len(row.draft.token_ids)):
        guessed = row.draft.guessed(index)
        yield bias_key(row.request, position + len(guessed), guessed)


def request_column(request: Request, keeps_counts: bool) -> np.ndarray:
    """int32[NUM_FIELDS], the request's column; what depends on the step is 0."""
    params = request.params
    values: dict[str, float | int] = {
        "temperature": params.temperature,
        "top_k": min(params.top_k, np.iinfo(np.int32).max),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "seed_lo": request.seed & 0xFFFFFFFF,
        "seed_hi": request.seed >> 32 & 0xFFFFFFFF,
        "child_index": request.child_index,
        "use_counts": keeps_counts,
        "want_logprobs": params.logprobs is not None,
    }
    column = np.zeros(NUM_FIELDS, np.int32)
    for name, value in values.items():
        dtype = np.float32 if name in FLOAT_FIELDS else np.uint32
        column[FIELD[name]] = np.asarray(value, dtype).view(np.int32)
    return column


def count_calls(counted: Sequence[tuple[int, int]], num_slots: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Slots and token ids of each call of `count_tokens`, int32[COUNTS_A_CALL] both, padded with slot C."""
    for start in range(0, len(counted), COUNTS_A_CALL):
        pairs = counted[start : start + COUNTS_A_CALL]
        columns = np.zeros((2, COUNTS_A_CALL), np.int32)
        columns[0] = num_slots
        columns[:, : len(pairs)] = np.transpose(pairs)
        yield columns[0], columns[1]
