"""Drafts as trees: paths, what holds of them, and parts of them."""

import numpy as np
import pytest

from jaxinfer.engine.draft import NO_DRAFT, Draft
from jaxinfer.engine.request import Request
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.sampling.bias import bias_key, under_one_bias

#   root -+- 5 (0) -+- 6 (1) --- 8 (4)
#         |         +- 7 (2)
#         +- 9 (3) --- 6 (5) --- 5 (6)
TREE = Draft((5, 6, 7, 9, 8, 6, 5), parents=(-1, 0, 0, -1, 1, 3, 5))


def follows(**after: int) -> object:
    """`holds` for a model that draws `after[f"n{index}"]` after each node, and `root` after the root."""
    return lambda parent, token: after.get("root" if parent < 0 else f"n{parent}") == token


def test_paths_and_depths_of_trees_and_chains() -> None:
    assert TREE.depths() == [1, 2, 2, 1, 3, 2, 3]
    assert TREE.depth == 3
    assert TREE.path(4) == [0, 1, 4] and TREE.guessed(6) == [9, 6, 5] and TREE.path(-1) == []
    chain = Draft((4, 5, 6))
    assert chain.depths() == [1, 2, 3] and chain.path(2) == [0, 1, 2] and chain.guessed(1) == [4, 5]
    assert NO_DRAFT.depth == 0


def test_what_holds_is_the_longest_path_of_what_was_drawn() -> None:
    assert TREE.held(follows(root=5, n0=6, n1=8, n4=1)) == (0, 1, 4)
    assert TREE.held(follows(root=9, n3=6, n5=1)) == (3, 5)
    assert TREE.held(follows(root=5, n0=3, n1=8)) == (0,)  # what follows a wrong token does not count
    assert TREE.held(follows(root=1, n0=6)) == ()
    assert Draft((4, 5, 6)).held(follows(root=4, n0=5, n1=7)) == (0, 1)
    twice = Draft((4, 4, 5), parents=(-1, -1, 1))
    assert twice.held(follows(root=4, n0=5, n1=5)) == (1, 2)


def test_a_part_of_a_tree_keeps_its_paths() -> None:
    part = TREE.only([0, 2, 3, 5])
    assert part.token_ids == (5, 7, 9, 6) and part.parents == (-1, 0, -1, 2)
    assert TREE.only(range(7)) is TREE
    assert Draft((4, 5, 6), lane=2).only([0]) == Draft((4,), lane=2)
    assert TREE.only([]).token_ids == ()


@pytest.mark.parametrize(
    "draft", [Draft((1, 2), parents=(-1,)), Draft((1, 2), parents=(-1, 1)), Draft((1,), parents=(-2,))]
)
def test_what_is_no_tree(draft: Draft) -> None:
    with pytest.raises(ValueError, match="parents"):
        draft.check()


def test_a_tree_that_was_drawn() -> None:
    with pytest.raises(ValueError, match="only chains"):
        TREE._replace(lane=0).check()
    TREE.check()


def banning(min_tokens: int, *words: tuple[int, ...]) -> Request:
    params = SamplingParams(min_tokens=min_tokens)
    params.bad_words_token_ids = words
    return Request("r", [1, 2], params, 0.0, 100, eos_token_ids=frozenset({0}), output_token_ids=[3])


def test_with_a_change_of_bans_goes_the_branch_behind_it() -> None:
    # After 9, 6 may not come: node 3's draw needs a row of its own, and the root and the others need none.
    assert list(under_one_bias(banning(0, (9, 6)), TREE)) == list(range(7))
    # After 5 no 6 and after 9 no 7: whichever comes first stays.
    assert list(under_one_bias(banning(0, (5, 6), (9, 7)), TREE)) == [0, 1, 2, 4]
    # The end is banned for two tokens more: the root and depth 1 share a row, deeper draws need none.
    assert list(under_one_bias(banning(3), TREE)) == list(range(7))
    assert list(under_one_bias(banning(3, (5, 6)), TREE)) == [3, 5]
    assert list(under_one_bias(banning(0), TREE)) == list(range(7))


def test_what_stays_needs_one_row_and_could_not_be_more() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        count = int(rng.integers(1, 10))
        parents = tuple(int(rng.integers(-1, index)) if index else -1 for index in range(count))
        draft = Draft(tuple(rng.integers(3, 6, count).tolist()), parents=parents)
        request = banning(int(rng.integers(0, 4)), (3, 4), (4, 5), (5, 3, 3))
        kept = list(under_one_bias(request, draft))
        known = request.num_known_tokens
        keys = {
            index: bias_key(request, known + len(draft.guessed(index)), draft.guessed(index)) for index in (-1, *kept)
        }
        rows = {key for key in keys.values() if key is not None}
        assert len(rows) <= 1
        assert all(draft.parent(index) in (-1, *kept) for index in kept)
        for index in set(range(count)) - set(kept):
            key = bias_key(request, known + len(draft.guessed(index)), draft.guessed(index))
            assert draft.parent(index) not in (-1, *kept) or (key is not None and {key} != rows)
