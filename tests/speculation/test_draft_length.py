"""num_speculative_tokens="auto": how long drafts become."""

import pytest

from jaxinfer.speculation.draft_length import FIRST_GUESS, DraftLength


def test_it_starts_in_the_middle() -> None:
    assert DraftLength(8).tokens() == FIRST_GUESS
    assert DraftLength(2).tokens() == 2


def test_right_guesses_make_it_long_and_wrong_ones_short() -> None:
    length = DraftLength(7)
    for _ in range(30):
        length.learn(length.tokens(), length.tokens())
    assert length.tokens() == 7
    for _ in range(30):
        length.learn(0, length.tokens())
    assert length.tokens() == 1
    for _ in range(30):
        length.learn(1, 1)
    assert length.tokens() == 7


@pytest.mark.parametrize(("right", "of", "expected"), [(1, 2, 2), (4, 5, 6), (1, 4, 2)])
def test_the_rule(right: int, of: int, expected: int) -> None:
    """Rates 1/2, 4/5 and 1/2: the largest n with rate ** n >= 1/4. Behind a wrong token none was tried."""
    length = DraftLength(8)
    for _ in range(200):
        length.learn(right, of)
    assert length.tokens() == expected
