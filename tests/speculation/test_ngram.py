"""N-gram lookup by hand, and against a loop over all places."""

import numpy as np
import pytest

from jaxinfer.engine.request import Request
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.speculation.ngram import NgramProposer, continuation, last_match


def array(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_the_longest_match_counts_and_of_those_the_latest() -> None:
    tokens = array(1, 2, 3, 9, 5, 2, 3, 7, 8, 3, 4, 1, 2, 3)
    assert last_match(tokens, 1, 3) == 3  # 1 2 3 at the beginning
    assert last_match(tokens, 1, 2) == 7  # 2 3, the second time
    assert last_match(tokens, 1, 1) == 10  # 3, the latest
    assert last_match(tokens, 4, 5) is None


def test_no_match() -> None:
    assert last_match(array(1, 2, 3), 1, 3) is None
    assert last_match(array(4), 1, 3) is None
    assert last_match(array(5, 1, 5), 2, 3) is None
    assert last_match(array(5, 1, 5), 1, 3) == 1


def test_a_continuation_goes_round() -> None:
    assert continuation(array(1, 2, 3, 4), 1, 2) == [2, 3]
    assert continuation(array(7, 8, 9, 8, 9), 3, 5) == [8, 9, 8, 9, 8]


def test_against_a_loop() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        tokens = rng.integers(0, 4, rng.integers(1, 30)).astype(np.int32)
        shortest, longest = sorted(rng.integers(1, 5, 2).tolist())
        found = None
        for length in range(shortest, longest + 1):
            for start in range(len(tokens) - length):
                if tokens[start : start + length].tolist() == tokens[-length:].tolist():
                    found = start + length
        assert last_match(tokens, shortest, longest) == found


def test_tokens_are_those_of_the_request_as_it_grows() -> None:
    request = Request("a", [1, 2, 3, 1, 2], SamplingParams(), 0.0, 900)
    proposer = NgramProposer(2, 3)
    assert proposer.propose([(request, 4)])[0].token_ids == (3, 1, 2, 3)
    request.output_token_ids += [9, 8] * 60
    assert proposer.propose([(request, 3)])[0].token_ids == (9, 8, 9)
    request.output_token_ids.append(5)
    assert proposer.propose([(request, 3)])[0].token_ids == ()


@pytest.mark.parametrize(("low", "high"), [(0, 3), (4, 3)])
def test_bad_lengths(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="prompt_lookup_min"):
        NgramProposer(low, high)
