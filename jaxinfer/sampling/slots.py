"""SlotTable: the host's copy of what each slot's request asks of the sampler, from which a step's rows are gathered."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.engine.plan import ScheduledRow
from jaxinfer.engine.request import Request
from jaxinfer.sampling.batch import FLOAT_FIELDS, NUM_FIELDS, SamplingBatch
from jaxinfer.sampling.bias import (
    BiasKey,
    bias_key,
    bias_row,
    counts_row,
    has_changing_bias,
    has_penalties,
    has_static_bias,
)

_FIELD = {name: index for index, name in enumerate(SamplingBatch._fields)}
_PER_ROW = [_FIELD[name] for name in ("slot", "target", "position")]


@dataclass(frozen=True, slots=True)
class SlotInputs:
    """What the sampler needs for one step.

    Attributes:
        packed: int32[NUM_FIELDS, R], for `SamplingBatch.unpack`. The logits rows of the step in plan order: of each
            scheduled row first its scored positions, then its draw; then padding.
        bias_uploads: (slot, float32[V]) that must be on the device before the step.
        counts_uploads: (slot, int32[V]) likewise.
        needs_sampler: False when every row is a plain greedy draw, so that `sample_greedy` does.
    """

    packed: np.ndarray
    bias_uploads: list[tuple[int, np.ndarray]]
    counts_uploads: list[tuple[int, np.ndarray]]
    needs_sampler: bool


class SlotTable:
    """Remembers which request each slot serves and its sampling constants. HOST: numpy only.

    Args:
        num_slots: C.
        vocab_size: V.
        custom_processors: there are custom logits processors, which act on every row and may read the counts: all
            rows then need the sampler and keep counts.
    """

    def __init__(self, num_slots: int, vocab_size: int, custom_processors: bool = False) -> None:
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        self.custom_processors = custom_processors
        self._constants = np.zeros((NUM_FIELDS, num_slots), np.int32)
        self._needs_sampler = np.zeros(num_slots, bool)
        self._owners: list[tuple[Request, int] | None] = [None] * num_slots
        self._bias_keys: list[BiasKey | None] = [None] * num_slots
        self._watched: set[int] = set()

    def prepare(self, rows: Sequence[ScheduledRow], num_rows: int) -> SlotInputs:
        """The sampler's inputs for a plan's rows, padded to `num_rows` logits rows (R).

        Raises:
            ValueError: the plan has more logits rows than `num_rows`, or a bad word of several tokens would have to
                be matched against a token that is still on the device.
        """
        slots: list[int] = []
        targets: list[int] = []
        positions: list[int] = []
        bias_uploads: list[tuple[int, np.ndarray]] = []
        counts_uploads: list[tuple[int, np.ndarray]] = []
        for row in rows:
            request = row.request
            slot = request.slot
            owner = self._owners[slot]
            if owner is None or owner[0] is not request or owner[1] != request.admission:
                self._admit(request, counts_uploads)
            if row.num_scored:
                first = row.start + 1
                slots += [slot] * row.num_scored
                targets += request.prompt_token_ids[first : first + row.num_scored]
                positions += range(first, first + row.num_scored)
            if row.samples:
                position = row.start + row.num_tokens
                if slot in self._watched:
                    self._refresh_bias(request, position, bias_uploads)
                slots.append(slot)
                targets.append(-1)
                positions.append(position)
        needs_sampler = self.custom_processors or bool(self._needs_sampler[slots].any())
        return SlotInputs(self._pack(slots, targets, positions, num_rows), bias_uploads, counts_uploads, needs_sampler)

    def _pack(self, slots: list[int], targets: list[int], positions: list[int], num_rows: int) -> np.ndarray:
        used = len(slots)
        if used > num_rows:
            raise ValueError(f"num_rows={num_rows} is less than the {used} logits rows of the plan")
        packed = np.zeros((NUM_FIELDS, num_rows), np.int32)
        packed[_FIELD["slot"], used:] = self.num_slots
        packed[:, :used] = self._constants[:, slots]
        packed[_PER_ROW, :used] = (slots, targets, positions)
        scored = np.flatnonzero(packed[_FIELD["target"], :used] >= 0)
        if scored.size:
            self._make_scoring(packed, scored)
        return packed

    def _make_scoring(self, packed: np.ndarray, scored: np.ndarray) -> None:
        """Scored rows write nothing, are not processed, and want logprobs even if the request's draws do not."""
        for name, value in (("slot", self.num_slots), ("temperature", 0), ("use_bias", 0), ("use_counts", 0)):
            packed[_FIELD[name], scored] = value
        packed[_FIELD["want_logprobs"], scored] = 1

    def _admit(self, request: Request, counts_uploads: list[tuple[int, np.ndarray]]) -> None:
        """Takes note of the request that has this slot now; an earlier admission's device state is stale."""
        params, slot = request.params, request.slot
        keeps_counts = self.custom_processors or has_penalties(params)
        self._owners[slot] = (request, request.admission)
        self._bias_keys[slot] = None
        self._constants[:, slot] = _constants(request, keeps_counts)
        self._needs_sampler[slot] = params.needs_sampler
        if has_static_bias(params) or has_changing_bias(params):
            self._watched.add(slot)
        else:
            self._watched.discard(slot)
        if keeps_counts:
            counts_uploads.append((slot, counts_row(request, self.vocab_size)))

    def _refresh_bias(self, request: Request, position: int, bias_uploads: list[tuple[int, np.ndarray]]) -> None:
        key = bias_key(request, position)
        slot = request.slot
        self._constants[_FIELD["use_bias"], slot] = key is not None
        if key is not None and key != self._bias_keys[slot]:
            bias_uploads.append((slot, bias_row(request, key, self.vocab_size)))
            self._bias_keys[slot] = key


def _constants(request: Request, keeps_counts: bool) -> np.ndarray:
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
        column[_FIELD[name]] = np.asarray(value, dtype).view(np.int32)
    return column
