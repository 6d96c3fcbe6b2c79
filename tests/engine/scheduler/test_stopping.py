"""Which token ends a request, and why (field cases 10, 11, 20)."""

import pytest

from jaxinfer.engine.request import Request
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.engine.stopping import check_stop


def request_with(output: list[int], max_total: int = 100, eos=(2,), **params) -> Request:
    params = SamplingParams(max_tokens=None, **params)
    return Request("r", [1, 1, 1], params, 0.0, max_total, frozenset(eos), output_token_ids=output)


def test_nothing_drawn_yet_goes_on():
    assert check_stop(request_with([], max_total=3)) is None


@pytest.mark.parametrize("eos", [(2,), (0, 2), (2, 7)])
def test_every_end_of_sequence_id_stops_without_a_stop_reason(eos):
    for token in eos:
        assert check_stop(request_with([5, token], eos=eos)) == ("stop", None)
    assert check_stop(request_with([2, 5], eos=eos)) is None


def test_stop_token_ids_are_named_and_also_act_without_eos():
    assert check_stop(request_with([5, 9], eos=(), stop_token_ids=[9])) == ("stop", 9)
    assert check_stop(request_with([5, 0], eos=(), stop_token_ids=[0])) == ("stop", 0)
    assert check_stop(request_with([2], eos=(2,), stop_token_ids=[2])) == ("stop", None)


@pytest.mark.parametrize(("min_tokens", "stops"), [(0, True), (3, True), (4, False), (5, False)])
def test_min_tokens_must_exist_before_an_ending_token(min_tokens, stops):
    ending = request_with([5, 5, 5, 2], min_tokens=min_tokens)
    named = request_with([5, 5, 5, 9], min_tokens=min_tokens, stop_token_ids=[9])
    assert bool(check_stop(ending)) is bool(check_stop(named)) is stops


def test_length_counts_the_prompt_and_yields_to_stop():
    assert check_stop(request_with([5, 5], max_total=5)) == ("length", None)
    assert check_stop(request_with([5], max_total=5)) is None
    assert check_stop(request_with([5, 2], max_total=5)) == ("stop", None)
    assert check_stop(request_with([5, 2], max_total=5, min_tokens=2)) == ("length", None)
