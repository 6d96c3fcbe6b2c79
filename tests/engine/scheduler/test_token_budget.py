"""Sharing a step's prefill tokens; rounding a step to a bucket."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.token_budget import share_tokens, trimmed_total

WANTS = st.lists(st.integers(1, 300), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("wants", "num_tokens", "min_chunk", "shares"),
    [
        ([10, 5], 32, 4, [10, 5]),
        ([2000], 31, 4, [31]),
        ([2000, 5], 31, 4, [26, 5]),
        ([2000, 2000, 5], 31, 4, [18, 8, 5]),
        ([40, 5], 31, 4, [31, 0]),
        ([30, 2000], 31, 4, [30, 0]),
        ([2000, 3], 3, 4, [3, 0]),
        ([2000, 2000, 2000], 8, 4, [4, 4, 0]),
    ],
)
def test_shares(wants, num_tokens, min_chunk, shares):
    assert share_tokens(wants, num_tokens, min_chunk) == shares


@given(WANTS, st.integers(1, 200), st.integers(1, 16))
def test_the_first_progresses_and_nothing_is_wasted(wants, num_tokens, min_chunk):
    shares = share_tokens(wants, num_tokens, min_chunk)
    assert all(0 <= share <= want for share, want in zip(shares, wants, strict=True))
    assert shares[0] >= min(wants[0], max(1, num_tokens // 2))
    left = num_tokens - sum(shares)
    assert left >= 0
    starved = [want for share, want in zip(shares, wants, strict=True) if share < want]
    assert left < min_chunk or not starved
    assert all(share >= min(min_chunk, want) for share, want in zip(shares[1:], wants[1:], strict=True) if share)


@pytest.mark.parametrize(
    ("num_tokens", "num_decodes", "total"),
    [
        (64, 0, 64),
        (65, 0, 64),
        (95, 10, 64),
        (96, 10, 96),
        (97, 10, 97),
        (70, 64, 70),
        (70, 62, 70),
        (70, 58, 64),
        (5, 0, 5),
        (200, 0, 200),
    ],
)
def test_trimmed_total(num_tokens, num_decodes, total):
    assert trimmed_total(num_tokens, num_decodes, (16, 32, 64, 128, 256)) == total


def test_without_buckets_nothing_is_trimmed():
    assert trimmed_total(65, 0, ()) == 65
