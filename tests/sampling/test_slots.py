"""SlotTable: a plan's rows become the packed matrix, and uploads happen exactly when a slot's row changes."""

import jax
import numpy as np
import pytest

from jaxinfer.engine.plan import ScheduledRow
from jaxinfer.engine.request import Request
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.sampling.batch import NUM_FIELDS, SamplingBatch
from jaxinfer.sampling.slots import SlotTable
from jaxinfer.sampling.state import IN_PROMPT, init_state, record_tokens, state_bytes, upload_bias, upload_counts

C, V = 4, 30


def make(slot, settings=None, prompt=(3, 1, 4), bad_words=(), **fields):
    params = SamplingParams(**(settings or {"temperature": 0}))
    params.bad_words_token_ids = tuple(bad_words)
    eos = frozenset({2})
    return Request(f"r{slot}", list(prompt), params, 0.0, 100, eos_token_ids=eos, slot=slot, admission=1, **fields)


def decode(request, num_drawn):
    """The row that draws output token `num_drawn`."""
    return ScheduledRow(request, request.num_prompt_tokens + num_drawn - 1, 1, True)


def unpacked(inputs):
    return jax.tree.map(np.asarray, SamplingBatch.unpack(jax.numpy.asarray(inputs.packed)))


def test_fields_survive_the_packing():
    settings = {
        "temperature": 0.7, "top_k": 12, "top_p": 0.85, "min_p": 0.05, "repetition_penalty": 1.2,
        "presence_penalty": -0.5, "frequency_penalty": 0.25, "logprobs": 2,
    }  # fmt: skip
    request = make(2, settings, seed=0xDEADBEEF_89ABCDEF, child_index=3)
    batch = unpacked(SlotTable(C, V).prepare([decode(request, 4)], 1))
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"):
        assert getattr(batch, name)[0] == np.asarray(settings[name], getattr(batch, name).dtype)
    assert batch.frequency_penalty[0] == 0.25
    assert (int(batch.seed_hi[0]), int(batch.seed_lo[0])) == (0xDEADBEEF, 0x89ABCDEF)
    assert batch.seed_lo.dtype == np.uint32
    assert (batch.slot[0], batch.target[0], batch.position[0], batch.child_index[0]) == (2, -1, 7, 3)
    assert (batch.use_bias[0], batch.use_counts[0], batch.want_logprobs[0]) == (0, 1, 1)


def test_scored_rows_precede_the_draw_and_padding_follows():
    prompt = [3, 1, 4, 1, 5]
    scoring = make(1, {"temperature": 1.0, "prompt_logprobs": 0, "logit_bias": {3: 1.0}}, prompt)
    plain = make(0)
    rows = [decode(plain, 0), ScheduledRow(scoring, 1, 4, True, num_scored=3), ScheduledRow(make(3), 0, 2, False)]
    inputs = SlotTable(C, V).prepare(rows, 7)
    batch = unpacked(inputs)
    assert inputs.packed.shape == (NUM_FIELDS, 7) and inputs.packed.dtype == np.int32
    assert batch.slot.tolist() == [0, C, C, C, 1, C, C]
    assert batch.target.tolist() == [-1, 4, 1, 5, -1, 0, 0]
    assert batch.position.tolist()[:5] == [3, 2, 3, 4, 5]
    assert batch.temperature.tolist() == [0, 0, 0, 0, 1, 0, 0]
    assert batch.use_bias.tolist() == [0, 0, 0, 0, 1, 0, 0]
    assert batch.want_logprobs.tolist() == [0, 1, 1, 1, 0, 0, 0]
    assert inputs.needs_sampler


def test_too_few_rows_is_an_error():
    with pytest.raises(ValueError, match="num_rows=1"):
        SlotTable(C, V).prepare([decode(make(0), 0), decode(make(1), 0)], 1)


def test_greedy_steps_need_no_sampler():
    table = SlotTable(C, V)
    greedy, warm = make(0), make(1, {"temperature": 1.0})
    assert not table.prepare([decode(greedy, 0)], 2).needs_sampler
    assert not table.prepare([decode(greedy, 1), ScheduledRow(warm, 0, 2, False)], 2).needs_sampler
    assert table.prepare([decode(greedy, 1), decode(warm, 0)], 2).needs_sampler
    assert not table.prepare([], 1).needs_sampler
    assert SlotTable(C, V, custom_processors=True).prepare([decode(greedy, 0)], 1).needs_sampler


def test_bias_is_uploaded_when_it_changes_and_not_before():
    table = SlotTable(C, V)
    request = make(1, {"temperature": 0, "min_tokens": 2, "logit_bias": {5: 1.0}})
    uploads = [table.prepare([decode(request, n)], 1).bias_uploads for n in range(5)]
    assert [len(found) for found in uploads] == [1, 0, 1, 0, 0]
    assert np.isneginf(uploads[0][0][1][2]) and uploads[2][0][1][2] == 0
    assert uploads[0][0][0] == 1


def test_bias_that_ends_is_switched_off_and_comes_back():
    table = SlotTable(C, V)
    request = make(0, bad_words=[(8, 9)])
    seen = []
    for n, token in enumerate([8, 1, 8, 8, 1]):
        inputs = table.prepare([decode(request, n)], 1)
        seen.append((len(inputs.bias_uploads), int(unpacked(inputs).use_bias[0])))
        request.output_token_ids.append(token)
    assert seen == [(0, 0), (1, 1), (0, 0), (0, 1), (0, 1)]


def test_a_new_owner_or_admission_starts_afresh():
    table = SlotTable(C, V)
    settings = {"temperature": 0, "presence_penalty": 1.0, "logit_bias": {5: 1.0}}
    first = make(0, settings)
    found = table.prepare([ScheduledRow(first, 0, 2, False)], 1)
    assert [slot for slot, _ in found.counts_uploads] == [0]
    assert table.prepare([decode(first, 0)], 1).counts_uploads == []
    first.output_token_ids += [6, 6]
    first.admission += 1  # preempted and admitted again: counts come from what is committed
    again = table.prepare([decode(first, 2)], 1)
    assert len(again.bias_uploads) == 1
    assert again.counts_uploads[0][1][[6, 3]].tolist() == [2, IN_PROMPT]
    other = make(0)
    batch = unpacked(table.prepare([decode(other, 0)], 1))
    assert (batch.use_bias[0], batch.use_counts[0]) == (0, 0)
    assert len(table.prepare([decode(make(0, settings), 0)], 1).bias_uploads) == 1


def test_custom_processors_keep_counts_for_all():
    inputs = SlotTable(C, V, custom_processors=True).prepare([decode(make(0), 0)], 1)
    assert len(inputs.counts_uploads) == 1
    assert unpacked(inputs).use_counts.tolist() == [1]


def test_uploads_replace_one_row_of_the_state():
    state = init_state(C, V)
    assert sum(leaf.nbytes for leaf in state) == state_bytes(C, V)
    state = upload_bias(state, 2, np.full(V, 1.5, np.float32))
    state = upload_counts(state, 1, np.full(V, 7, np.int32))
    assert np.asarray(state.bias).sum(1).tolist() == [0, 0, 1.5 * V, 0]
    assert np.asarray(state.counts).sum(1).tolist() == [0, 7 * V, 0, 0]


def test_record_drops_slots_out_of_range():
    slot = np.asarray([C, 3], np.int32)
    state = record_tokens(init_state(C, V), slot, np.asarray([5, 6], np.int32), np.asarray([True, True]))
    assert np.asarray(state.last_tokens).tolist() == [0, 0, 0, 6]
    assert np.argwhere(np.asarray(state.counts)).tolist() == [[3, 6]]
