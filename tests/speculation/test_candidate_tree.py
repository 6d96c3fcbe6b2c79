"""Which combinations of guesses are worth verifying."""

import itertools
from typing import Any

import numpy as np
import pytest

from jaxinfer.engine.draft import NO_DRAFT, Draft
from jaxinfer.speculation.candidate_tree import best_tree, check_choices, shaped_tree


def candidates(seed: int, places: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids that tell place and candidate, and falling log-probabilities."""
    rng = np.random.default_rng(seed)
    scores = -np.sort(rng.exponential(1.5, (places, width)).astype(np.float32), axis=1)
    ids = 100 * np.arange(places)[:, None] + np.arange(width)
    return ids.astype(np.int32), scores


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """Each node as the candidates on its path."""
    found = []
    for index in range(len(draft.token_ids)):
        tokens = draft.guessed(index)
        assert [token // 100 for token in tokens] == list(range(len(tokens)))
        found.append(tuple(token % 100 for token in tokens))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_the_likeliest_nodes_of_all_there_are(seed: int) -> None:
    ids, scores = candidates(seed, 3, 4)
    score = {
        path: float(sum(scores[place][rank] for place, rank in enumerate(path)))
        for depth in (1, 2, 3)
        for path in itertools.product(range(4), repeat=depth)
    }
    ordered = sorted(score, key=lambda path: -score[path])
    for count in (1, 7, 20, 84, 100):
        draft = best_tree(ids, scores, count)
        draft.check()
        assert paths(draft) == ordered[:count]


def test_certain_heads_make_a_chain_and_none_make_nothing() -> None:
    ids, scores = candidates(0, 4, 5)
    scores = np.full_like(scores, -30.0)
    scores[:, 0] = 0.0
    draft = best_tree(ids, scores, 4)
    assert draft == Draft((0, 100, 200, 300), parents=(-1, 0, 1, 2))
    assert best_tree(ids[:0], scores[:0], 4) is NO_DRAFT and best_tree(ids, scores, 0) is NO_DRAFT


def test_a_given_shape() -> None:
    choices = check_choices([[0], [0, 0], [2], [0, 1], [2, 0], [0, 0, 0]])
    ids, scores = candidates(1, 3, 3)
    draft = shaped_tree(ids, scores, 9, choices)
    draft.check()
    assert set(paths(draft)) == set(choices)
    score = [sum(scores[place][rank] for place, rank in enumerate(path)) for path in paths(draft)]
    assert score == sorted(score, reverse=True)
    fewer = shaped_tree(ids, scores, 3, choices)
    fewer.check()
    assert paths(fewer) == paths(draft)[:3]


@pytest.mark.parametrize("choices", [[], [[]], [[0], [0]], [[0], [1, 0]], [[0], [True]], [[0], ["0"]]])
def test_shapes_that_are_no_trees(choices: Any) -> None:
    with pytest.raises(ValueError, match="medusa_choices"):
        check_choices(choices)


def test_shapes_of_other_types() -> None:
    for choices in (5, [0, 1], "[[0]]", ["00"], {0: [0]}):
        with pytest.raises(TypeError, match="medusa_choices=.*list of paths"):
            check_choices(choices)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"medusa_choices holds \[\[0\]\]"):
        check_choices([[0], [[0]]])  # type: ignore[list-item]
