"""StepInput: what a step's program reads, and its assembly in numpy into ONE host-to-device transfer."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from jaxinfer.config import TypicalAcceptance
from jaxinfer.engine.plan import ScheduledRow
from jaxinfer.engine.request import Request
from jaxinfer.runner.tree_rows import num_words, tree_bits
from jaxinfer.sampling.batch import NUM_FIELDS
from jaxinfer.sampling.draft_rows import num_packed_rows


@dataclass(frozen=True)
class StepSpec:
    """The static side of a step program: two steps with equal specs run the same compiled program.

    Attributes:
        num_tokens: T, tokens after padding.
        num_rows: B, rows after padding.
        table_width: M, entries of a block table.
        sampler: the step draws with the full sampler; False compiles an argmax and nothing else.
        num_logits: R, logits rows after padding; 0 for as many as rows.
        num_drafts: K, tokens of a draft before a row that the sampler knows of at most.
        keeps_probabilities: the sampler decides about drafts that were drawn.
        tree_width: Qmax, new tokens of a row whose draft is a tree, at most; 0 without trees.
        typical: the lossy rule that decides what holds of trees; None for none.
        tile: tokens, and logits rows, that are computed at a time, which T and R are multiples of; 0 for all at once.
    """

    num_tokens: int
    num_rows: int
    table_width: int
    sampler: bool
    num_logits: int = 0
    num_drafts: int = 0
    keeps_probabilities: bool = False
    tree_width: int = 0
    typical: TypicalAcceptance | None = None
    tile: int = 0


class StepInput(NamedTuple):
    """One ragged step on the device; padding tokens and rows do no harm anywhere.

    Attributes:
        tokens: int32[T], ids; ignored where `token_slots` is not negative.
        token_slots: int32[T], slot whose last drawn token this is, -1 for ids given in `tokens`.
        positions: int32[T], position in the token's own sequence.
        page_ids: int32[T], page that takes the token's key and value; 0, the sink, for padding.
        logits_tokens: int32[R], index of the token of each logits row.
        query_start: int32[B + 1], first token of each row, padded with the number of real tokens.
        context_lens: int32[B], positions of each row with its new tokens.
        block_tables: int32[B, M].
        sampling: int32[NUM_FIELDS, R] for `SamplingBatch.unpack`, below it what `DraftRows.unpack` reads; without the
            sampler int32[1, R], the slots.
        offsets: int32[T], where in its page the token's key and value go: in a tree, whose tokens lie in a row, this
            does not follow from the position. Only where the step may have trees, else empty.
        tree: int32[T, W], for `unpack_tree`; likewise.
    """

    tokens: jax.Array
    token_slots: jax.Array
    positions: jax.Array
    page_ids: jax.Array
    logits_tokens: jax.Array
    query_start: jax.Array
    context_lens: jax.Array
    block_tables: jax.Array
    sampling: jax.Array
    offsets: jax.Array | None = None
    tree: jax.Array | None = None


def input_shapes(spec: StepSpec) -> tuple[tuple[int, ...], ...]:
    """The shape of every field of a StepInput, in the order in which they are packed."""
    t, b = (spec.num_tokens,), spec.num_rows
    r = spec.num_logits or b
    fields = (
        NUM_FIELDS + num_packed_rows(spec.num_drafts, spec.keeps_probabilities, spec.typical is not None)
        if spec.sampler
        else 1
    )
    none: tuple[int, ...] = (0,)
    offsets, tree = (t, (*t, num_words(spec.tree_width))) if spec.tree_width else (none, none)
    return t, t, t, t, (r,), (b + 1,), (b,), (b, spec.table_width), (fields, r), offsets, tree


def packed_size(spec: StepSpec) -> int:
    """Number of int32 of a packed StepInput."""
    return sum(int(np.prod(shape)) for shape in input_shapes(spec))


def unpack(packed: jax.Array | np.ndarray, spec: StepSpec) -> StepInput:
    """Views of the fields in ``packed[packed_size(spec)]``; works on numpy and under jit."""
    parts, start = [], 0
    for shape in input_shapes(spec):
        size = int(np.prod(shape))
        parts.append(packed[start : start + size].reshape(shape))
        start += size
    return StepInput(*parts)  # type: ignore[arg-type]


class BlockTables:
    """The host's dense copy of the block tables of all slots, int32[C, M].

    A table is extended as blocks are appended, its last block may be replaced by a copy of its own before the request
    goes on writing, and its last blocks may go and others come when a draft was wrong; the blocks before that stay.

    Args:
        num_slots: C.
        table_width: M.
        num_draft_blocks: blocks that are given back behind a wrong draft, at most.
    """

    def __init__(self, num_slots: int, table_width: int, num_draft_blocks: int = 0) -> None:
        self.tables = np.zeros((num_slots, table_width), np.int32)
        self._filled = [0] * num_slots
        self._last: list[list[int]] = [[]] * num_slots
        self._num_last = 1 + num_draft_blocks
        self._owners: list[tuple[Request, int] | None] = [None] * num_slots

    def update(self, rows: tuple[ScheduledRow, ...]) -> None:
        """Takes over what the scheduler changed in the rows' block tables since they were last seen."""
        for row in rows:
            request = row.request
            slot, blocks = request.slot, request.block_ids
            owner = self._owners[slot]
            # By identity: a request id may come again once its request has ended.
            if owner is None or owner[0] is not request or owner[1] != request.admission:
                self._owners[slot] = (request, request.admission)
                self._filled[slot] = 0
            filled, last = self._filled[slot], blocks[-self._num_last :]
            if len(blocks) != filled or last != self._last[slot]:
                first = max(min(filled, len(blocks)) - self._num_last, 0)
                self.tables[slot, first : len(blocks)] = blocks[first:]
                self._filled[slot] = len(blocks)
                self._last[slot] = last


def assemble(
    rows: tuple[ScheduledRow, ...], spec: StepSpec, tables: BlockTables, block_size: int, sampling: np.ndarray
) -> np.ndarray:
    """Packs a plan's rows for the device.

    Args:
        rows: the plan, at most B rows with at most T tokens.
        spec: the program's shape.
        tables: block tables, `update`d with these rows.
        block_size: S.
        sampling: int32[NUM_FIELDS or 1, R].

    Returns:
        int32[packed_size(spec)], a fresh array: the device may read it while the next one is made.
    """
    packed = np.zeros(packed_size(spec), np.int32)
    step = unpack(packed, spec)
    count = len(rows)
    slots = np.fromiter((row.request.slot for row in rows), np.int32, count)
    starts = np.fromiter((row.start for row in rows), np.int32, count)
    lengths = np.fromiter((row.num_tokens for row in rows), np.int32, count)
    on_device = np.fromiter((row.token_on_device for row in rows), bool, count)
    ends = np.cumsum(lengths, dtype=np.int32)
    total = int(ends[-1])
    step.tokens[:total] = _known_tokens(rows)
    step.token_slots[:] = -1
    step.token_slots[ends[on_device] - 1] = slots[on_device]
    owner = np.repeat(np.arange(count, dtype=np.int32), lengths)
    places = np.arange(total, dtype=np.int32) + (starts - ends + lengths)[owner]
    step.positions[:total] = places
    step.page_ids[:total] = tables.tables[slots[owner], places // block_size]
    if spec.tree_width and step.offsets is not None and step.tree is not None:
        for row, end in zip(rows, ends.tolist(), strict=True):
            if row.draft.parents:
                depths = np.asarray(row.draft.depths(), np.int32)
                step.positions[end - len(depths) : end] = row.start + depths
        step.offsets[:total] = places % block_size
        step.tree[:total] = tree_bits(rows, places - starts[owner], step.tree.shape[1])
    step.query_start[1 : count + 1] = ends
    step.query_start[count + 1 :] = total
    step.context_lens[:count] = starts + lengths
    step.block_tables[:count] = tables.tables[slots]
    logits_tokens = _logits_tokens(rows, ends)
    step.logits_tokens[: len(logits_tokens)] = logits_tokens
    step.sampling[:] = sampling
    return packed


def _known_tokens(rows: tuple[ScheduledRow, ...]) -> list[int]:
    """The ids of all new tokens; 0 stands where the id is still on the device."""
    tokens: list[int] = []
    for row in rows:
        if row.token_on_device:
            tokens += row.request.token_ids(row.start, row.start + row.num_tokens - 1)
            tokens.append(0)
        elif row.draft.token_ids:
            tokens.append(row.request.token_ids(row.start, row.start + 1)[0])
            tokens += row.draft.token_ids
        else:
            tokens += row.request.token_ids(row.start, row.start + row.num_tokens)
    return tokens


def _logits_tokens(rows: tuple[ScheduledRow, ...], ends: np.ndarray) -> list[int]:
    """Token index of each logits row: of each row first its scored positions, then its draw, then those behind each
    token of its draft."""
    indices: list[int] = []
    for row, end in zip(rows, ends.tolist(), strict=True):
        first = end - row.num_tokens
        indices += range(first, first + row.num_scored)
        if row.samples:
            indices += range(end - 1 - len(row.draft.token_ids), end)
    return indices
