"""Steps with trees: places, positions and sight of every token by hand, and what the sampler knows of each."""

import numpy as np

from jaxinfer.engine.draft import Draft
from jaxinfer.engine.plan import ScheduledRow
from jaxinfer.engine.request import Request
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.runner.inputs import BlockTables, StepSpec, assemble, unpack
from jaxinfer.runner.tree_rows import num_words, tree_bits, unpack_tree
from jaxinfer.sampling.batch import FIELD, NUM_FIELDS, VERIFIES
from jaxinfer.sampling.slots import SlotTable

#   8 -+- 20 (0) --- 22 (2)
#      +- 21 (1) -+- 23 (3) --- 25 (5)
#                 +- 24 (4)
DRAFT = Draft((20, 21, 22, 23, 24, 25), parents=(-1, -1, 0, 1, 1, 3))


def rows_of(params: SamplingParams) -> tuple[ScheduledRow, ...]:
    guessing = Request("a", [5, 6, 7], params, 0.0, 100, seed=3, output_token_ids=[8])
    guessing.slot, guessing.admission, guessing.block_ids = 2, 1, [9, 3, 4]
    prompt = Request("b", [11, 12, 13, 14, 15], SamplingParams(temperature=0), 0.0, 100)
    prompt.slot, prompt.admission, prompt.block_ids = 1, 1, [6, 7]
    return (
        ScheduledRow(guessing, 3, 7, samples=True, draft=DRAFT),
        ScheduledRow(prompt, 1, 3, samples=False),
    )


def test_every_field_of_a_step_with_a_tree() -> None:
    spec = StepSpec(num_tokens=12, num_rows=3, table_width=3, sampler=False, num_logits=8, tree_width=8)
    rows = rows_of(SamplingParams(temperature=0))
    tables = BlockTables(num_slots=3, table_width=3)
    tables.update(rows)
    step = unpack(assemble(rows, spec, tables, 4, np.zeros((1, 8), np.int32)), spec)
    assert step.tokens.tolist() == [8, 20, 21, 22, 23, 24, 25, 12, 13, 14, 0, 0]
    assert step.positions.tolist() == [3, 4, 4, 5, 5, 5, 6, 1, 2, 3, 0, 0]
    assert step.page_ids.tolist() == [9, 3, 3, 3, 3, 4, 4, 6, 6, 6, 0, 0]
    assert step.offsets is not None and step.tree is not None
    assert step.offsets.tolist() == [3, 0, 1, 2, 3, 0, 1, 1, 2, 3, 0, 0]
    assert step.context_lens.tolist() == [10, 4, 0]
    assert step.logits_tokens.tolist()[:7] == list(range(7))
    seen = np.asarray(unpack_tree(step.tree, 8))
    sees = [np.flatnonzero(row).tolist() for row in seen]
    assert sees == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 5], [0, 2, 4, 6], [0], [0, 1], [0, 1, 2], [], []]


def test_sight_of_wide_trees() -> None:
    """More than a word of bits; every token sees its path, which is walked here from parent to parent."""
    rng = np.random.default_rng(0)
    parents = tuple(int(rng.integers(-1, index)) if index else -1 for index in range(99))
    (row, _) = rows_of(SamplingParams(temperature=0))
    wide = ScheduledRow(row.request, 3, 100, samples=True, draft=Draft((1,) * 99, parents=parents))
    seen = np.asarray(unpack_tree(tree_bits((wide,), np.arange(100), num_words(100)), 100))
    for index in range(99):
        path, node = {0}, index
        while node >= 0:
            path.add(1 + node)
            node = parents[node]
        assert set(np.flatnonzero(seen[1 + index]).tolist()) == path
    chain = np.asarray(unpack_tree(tree_bits((ScheduledRow(row.request, 0, 70, False),), np.arange(70), 3), 70))
    assert (chain == np.tril(np.ones((70, 70), bool))).all()


def test_the_sampler_draws_each_token_as_behind_its_path() -> None:
    params = SamplingParams(temperature=0.5, seed=3, frequency_penalty=1.0, min_tokens=4, stop_token_ids=[1])
    table = SlotTable(num_slots=3, vocab_size=32, num_drafts=3)
    packed = table.prepare(rows_of(params), 8).packed
    assert packed[FIELD["target"], :7].tolist() == [VERIFIES] * 7
    assert packed[FIELD["position"], :7].tolist() == [4, 5, 5, 6, 6, 6, 7]
    prefix = packed[NUM_FIELDS : NUM_FIELDS + 3, :7].T.tolist()
    assert prefix == [
        [-1, -1, -1],
        [20, -1, -1],
        [21, -1, -1],
        [20, 22, -1],
        [21, 23, -1],
        [21, 24, -1],
        [21, 23, 25],
    ]
    # The fourth token of the output is the first that may end it.
    assert packed[FIELD["use_bias"], :7].tolist() == [1, 1, 1, 1, 1, 1, 0]
