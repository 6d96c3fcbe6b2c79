"""Which step sizes are compiled, and which one a step takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.runner.buckets import bucket_for, token_buckets


def test_known_lists() -> None:
    assert token_buckets(32, 2048) == (1, 8, 16, 32, 128, 512, 2048)
    assert token_buckets(8, 256) == (1, 8, 32, 128, 256)
    assert token_buckets(1, 1) == (1,)
    assert token_buckets(3, 20) == (1, 8, 20)


@given(st.integers(1, 1024), st.integers(1, 16384))
def test_the_list_is_short_and_covers_every_step(max_num_seqs: int, extra: int) -> None:
    budget = max_num_seqs + extra
    buckets = token_buckets(max_num_seqs, budget)
    assert buckets[0] == 1 and buckets[-1] == budget
    assert len(buckets) <= 16
    for num_tokens in {1, 2, max_num_seqs, budget}:
        assert bucket_for(num_tokens, buckets) >= num_tokens


@given(st.integers(9, 1024))
def test_a_decode_step_is_at_least_half_full(max_num_seqs: int) -> None:
    buckets = token_buckets(max_num_seqs, 4 * max_num_seqs)
    for running in range(9, max_num_seqs + 1):
        assert bucket_for(running, buckets) < 2 * running


def test_a_step_beyond_the_largest_is_refused() -> None:
    with pytest.raises(ValueError, match="num_tokens=9 exceeds the largest bucket 8"):
        bucket_for(9, (1, 8))
