"""Assembling a plan for the device: every field by hand for a small step, and the incremental block tables."""

import numpy as np
import pytest

from jaxinfer.engine.plan import ScheduledRow
from jaxinfer.engine.request import Request
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.runner.inputs import BlockTables, StepSpec, assemble, packed_size, unpack

SPEC = StepSpec(num_tokens=8, num_rows=4, table_width=3, sampler=False)


def make_request(name: str, slot: int, prompt: list[int], blocks: list[int], output: tuple[int, ...] = ()) -> Request:
    request = Request(name, prompt, SamplingParams(), 0.0, max_total_tokens=12)
    request.slot, request.admission, request.block_ids = slot, 1, blocks
    request.output_token_ids = list(output)
    return request


def test_every_field_of_a_mixed_step() -> None:
    decoding = make_request("a", 2, [5, 6, 7], [9], output=(8,))
    running_ahead = make_request("b", 0, [1, 2, 3, 4], [3, 7])
    running_ahead.num_inflight = 1
    prompt = make_request("c", 1, [11, 12, 13, 14, 15], [4, 6])
    rows = (
        ScheduledRow(decoding, 3, 1, samples=True),
        ScheduledRow(running_ahead, 4, 1, samples=True, token_on_device=True),
        ScheduledRow(prompt, 1, 3, samples=False, num_scored=2),
    )
    tables = BlockTables(num_slots=3, table_width=3)
    tables.update(rows)
    sampling = np.array([[2, 0, 3, 3]], np.int32)
    step = unpack(assemble(rows, SPEC, tables, 4, sampling), SPEC)
    assert step.tokens.tolist() == [8, 0, 12, 13, 14, 0, 0, 0]
    assert step.token_slots.tolist() == [-1, 0, -1, -1, -1, -1, -1, -1]
    assert step.positions.tolist() == [3, 4, 1, 2, 3, 0, 0, 0]
    assert step.page_ids.tolist() == [9, 7, 4, 4, 4, 0, 0, 0]
    assert step.query_start.tolist() == [0, 1, 2, 5, 5]
    assert step.context_lens.tolist() == [4, 5, 4, 0]
    assert step.block_tables.tolist() == [[9, 0, 0], [3, 7, 0], [4, 6, 0], [0, 0, 0]]
    assert step.logits_tokens.tolist() == [0, 1, 2, 3]
    assert step.sampling.tolist() == sampling.tolist()


def test_packed_size_counts_every_field() -> None:
    packed = np.arange(packed_size(SPEC), dtype=np.int32)
    fields = unpack(packed, SPEC)
    assert sorted(value for field in fields for value in field.ravel().tolist()) == packed.tolist()


def test_block_tables_follow_appends_and_change_of_owner() -> None:
    tables = BlockTables(num_slots=1, table_width=4)
    first = make_request("a", 0, [1], [5, 6])
    tables.update((ScheduledRow(first, 0, 1, True),))
    first.block_ids.append(8)
    tables.update((ScheduledRow(first, 1, 1, True),))
    assert tables.tables[0, :3].tolist() == [5, 6, 8]
    first.block_ids, first.admission = [2], 2  # preempted and admitted again
    tables.update((ScheduledRow(first, 0, 1, True),))
    assert tables.tables[0, 0] == 2
    tables.update((ScheduledRow(make_request("b", 0, [1], [7]), 0, 1, True),))
    assert tables.tables[0, 0] == 7
    # Ids come again: another request of the same name, admitted as often, in the same slot.
    tables.update((ScheduledRow(make_request("b", 0, [1], [4]), 0, 1, True),))
    assert tables.tables[0, 0] == 4


@pytest.mark.parametrize(("changed", "position"), [([5, 6, 9], 10), ([5, 6, 9, 2], 12)])
def test_block_tables_follow_a_last_block_that_was_replaced(changed: list[int], position: int) -> None:
    """By a copy of its own, with or without a block appended in the same step."""
    tables = BlockTables(num_slots=1, table_width=4)
    request = make_request("a", 0, [1], [5, 6, 8])
    tables.update((ScheduledRow(request, 9, 1, True),))
    request.block_ids[:] = changed
    tables.update((ScheduledRow(request, position, 1, True),))
    assert tables.tables[0, : len(changed)].tolist() == changed


def test_each_step_gets_a_buffer_of_its_own() -> None:
    request = make_request("a", 0, [1, 2], [3])
    rows = (ScheduledRow(request, 0, 2, True),)
    tables = BlockTables(1, 3)
    tables.update(rows)
    sampling = np.zeros((1, 4), np.int32)
    first, second = (assemble(rows, SPEC, tables, 4, sampling) for _ in range(2))
    assert not np.shares_memory(first, second)


def test_sampling_of_another_width_does_not_fit() -> None:
    rows = (ScheduledRow(make_request("a", 0, [1], [3]), 0, 1, True),)
    with pytest.raises(ValueError, match="broadcast"):
        assemble(rows, SPEC, BlockTables(1, 3), 4, np.zeros((1, 5), np.int32))
