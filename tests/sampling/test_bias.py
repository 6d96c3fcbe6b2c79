"""Bias rows: field cases 5 (bad words, allow lists) and 10 (min_tokens), on the host."""

import numpy as np
import pytest

from jaxinfer.engine.request import Request
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.sampling.bias import bias_key, bias_row, counts_row
from jaxinfer.sampling.state import IN_PROMPT

V = 20
PROMPT = [3, 7, 5]


def request(output=(), inflight=0, eos=(2,), bad_words=(), **settings):
    params = SamplingParams(**settings)
    params.bad_words_token_ids = tuple(bad_words)
    made = Request("r", list(PROMPT), params, 0.0, 100, eos_token_ids=frozenset(eos))
    made.output_token_ids = list(output)
    made.num_inflight = inflight
    return made


def banned(req, num_drawn):
    """Ids that cannot be the output token of index `num_drawn`."""
    key = bias_key(req, len(PROMPT) + num_drawn)
    if key is None:
        return set()
    return set(np.flatnonzero(np.isneginf(bias_row(req, key, V))).tolist())


def test_plain_requests_have_no_bias():
    assert bias_key(request(), 3) is None
    assert bias_key(request(temperature=0.3, top_k=4, stop_token_ids=[4], repetition_penalty=2.0), 9) is None


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_bans_every_end_until_that_many_exist(ignore_eos):
    """The tokens of index 0 .. min_tokens - 1 may not end the request; the next one may, in flight or not."""
    eos = () if ignore_eos else (2, 9)
    ends = {4, *eos}
    req = request(eos=eos, min_tokens=3, stop_token_ids=[4])
    assert [banned(req, n) for n in range(5)] == [ends, ends, ends, set(), set()]
    in_flight = request(output=[6, 6], inflight=1, eos=eos, min_tokens=3, stop_token_ids=[4])
    assert banned(in_flight, 3) == set()


def test_ids_beyond_the_model_are_ignored():
    assert banned(request(eos=(2, V, V + 5), min_tokens=1, bad_words=[(V + 1,)]), 0) == {2}


def test_min_tokens_key_changes_once():
    req = request(min_tokens=2, logit_bias={1: 5.0})
    keys = [bias_key(req, 3 + n) for n in range(5)]
    assert keys[0] == keys[1] != keys[2] == keys[3] == keys[4]
    assert bias_row(req, keys[4], V).tolist() == [0, 5.0] + [0] * (V - 2)


def test_single_token_bad_words_hold_always():
    assert banned(request(bad_words=[(8,), (11,)]), 0) == {8, 11}
    assert bias_key(request(output=[1] * 50, bad_words=[(8,)]), 40) == bias_key(request(bad_words=[(8,)]), 3)


def test_bad_words_of_several_tokens_ban_only_what_completes_them():
    words = [(12, 7), (13, 14, 15)]
    cases = [([], set()), ([12], {7}), ([12, 1], set()), ([7], set()), ([13], set()), ([13, 14], {15}), ([14], set())]
    for output, expected in cases:
        assert banned(request(output, bad_words=words), len(output)) == expected, output
    both = [(12, 7), (13, 12, 9)]
    assert banned(request([13, 12], bad_words=both), 2) == {7, 9}


def test_bad_words_match_output_ids_only():
    """The prompt ends in 7, 5: neither continues into the output."""
    words = [(5, 6), (7, 5, 8)]
    assert bias_key(request(bad_words=words), 3) is None
    assert banned(request([5], bad_words=words), 1) == {6}


def test_bad_words_use_the_ids_before_the_draw_only():
    assert banned(request([1, 12, 4, 4], bad_words=[(12, 7)]), 2) == {7}


def test_bad_words_need_committed_output():
    req = request([1], inflight=1, bad_words=[(12, 7)])
    with pytest.raises(ValueError, match="commit"):
        bias_key(req, 5)


def test_allow_list_with_bias_and_bans():
    row_of = request(allowed_token_ids=[4, 6], logit_bias={4: 1000.0, 9: 5.0})
    row = bias_row(row_of, bias_key(row_of, 3), V)
    assert row[4] == 100.0 and row[6] == 0.0
    assert np.isneginf(np.delete(row, [4, 6])).all()
    contradiction = request(allowed_token_ids=[4], bad_words=[(4,)])
    assert banned(contradiction, 0) == set(range(V))


def test_counts_row():
    row = counts_row(request([5, 5, 1]), V)
    assert row.dtype == np.int32
    expected = {3: IN_PROMPT, 7: IN_PROMPT, 5: IN_PROMPT + 2, 1: 1}
    assert {int(i): int(row[i]) for i in np.flatnonzero(row)} == expected
    assert not counts_row(request(), V)[[0, 1]].any()
