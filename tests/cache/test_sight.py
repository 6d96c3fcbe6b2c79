"""Which blocks a window hides, against the windows of the tokens themselves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.cache.sight import BlockSight


def seen_blocks(position: int, window: int, size: int) -> set[int]:
    return {seen // size for seen in range(max(0, position - window + 1), position + 1)}


@given(size=st.integers(1, 20), window=st.integers(1, 70), position=st.integers(0, 200))
def test_hidden_blocks_are_those_that_no_later_token_sees(size: int, window: int, position: int) -> None:
    seen = set().union(*(seen_blocks(later, window, size) for later in range(position, position + window + size)))
    assert BlockSight(size, window).num_hidden(position) == min(seen)


@given(size=st.integers(1, 9), window=st.integers(1, 30), num_tokens=st.integers(1, 90), chunk=st.integers(1, 40))
def test_most_blocks_is_what_the_worst_step_holds(size: int, window: int, num_tokens: int, chunk: int) -> None:
    """Steps of every size up to `chunk` from every position: all that can come up."""
    held = 0
    for start in range(num_tokens):
        stop = min(start + chunk, num_tokens)
        held = max(held, len(set().union(*(seen_blocks(position, window, size) for position in range(start, stop)))))
    sight = BlockSight(size, window)
    bound = sight.most_blocks(num_tokens, chunk)
    assert held <= bound
    if num_tokens >= window + chunk + size:  # long enough for the worst place to come up
        assert held == bound


def test_without_a_window_everything_is_needed() -> None:
    sight = BlockSight(16)
    assert sight.num_hidden(10**6) == 0
    assert [sight.most_blocks(tokens, 8) for tokens in (1, 16, 17, 100)] == [1, 1, 2, 7]


@pytest.mark.parametrize(("position", "hidden"), [(0, 0), (4110, 0), (4111, 1), (4126, 1), (4127, 2), (32_000, 1744)])
def test_mistral_by_hand(position: int, hidden: int) -> None:
    """Window 4096 over blocks of 16: position 4111 sees from 16 on."""
    assert BlockSight(16, 4096).num_hidden(position) == hidden
