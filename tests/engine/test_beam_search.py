"""Beam search on the host, against a naive one over whole matrices and against looking at every sequence."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.engine.beam_search import BeamSearch, Candidates
from jaxinfer.engine.beam_search_params import BeamSearchParams

Model = Callable[[Sequence[int]], np.ndarray]
Naive = Callable[..., list[tuple[list[int], float]]]


def random_model(seed: int, vocab: int) -> Model:
    """float64[V] log-probabilities that depend on every token so far."""

    def logprobs(tokens: Sequence[int]) -> np.ndarray:
        logits = np.random.default_rng([seed, *tokens]).normal(0, 2, vocab)
        return logits - np.log(np.exp(logits).sum())

    return logprobs


def search(model: Model, width: int, max_tokens: int, penalty: float, ends: set[int]) -> list[tuple[list[int], float]]:
    """Results of the class under test, as (ids, score)."""
    found = BeamSearch(width, max_tokens, penalty, frozenset(ends))
    tokens: list[list[int]] = [[]]
    while not found.is_done:
        given = []
        for beam in tokens:
            logprobs = model(beam)
            best = np.argsort(-logprobs, kind="stable")[: found.num_candidates]
            given.append(Candidates(best.tolist(), logprobs[best].tolist()))
        tokens = [[*tokens[parent], token] for parent, token in found.advance(given)]
        assert tokens == [beam.token_ids for beam in found.beams]
    return [(beam.token_ids, found.score(beam)) for beam in found.best()]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 4),
    num_ends=st.integers(0, 2),
    spare=st.integers(0, 5),
    max_tokens=st.integers(1, 7),
    penalty=st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]),
)
def test_equals_the_naive_search(
    naive_beam_search: Naive, seed: int, width: int, num_ends: int, spare: int, max_tokens: int, penalty: float
) -> None:
    model = random_model(seed, max(2, 1 + num_ends) * width + spare)
    arguments = model, width, max_tokens, penalty, set(range(1, 1 + num_ends))
    found, expected = search(*arguments), naive_beam_search(*arguments)
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-9)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_beam_as_wide_as_everything_finds_the_best(penalty: float) -> None:
    vocab, max_tokens, end = 3, 4, 0
    model = random_model(5, vocab)
    scores = {}
    for length in range(1, max_tokens + 1):
        for ids in itertools.product(range(vocab), repeat=length):
            if end in ids[:-1] or (length < max_tokens and ids[-1] != end):
                continue
            total = sum(model(ids[:index])[token] for index, token in enumerate(ids))
            scores[ids] = total / length**penalty
    best = sorted(scores, key=lambda ids: -scores[ids])
    found = search(model, len(scores), max_tokens, penalty, {end})
    assert [tuple(ids) for ids, _ in found] == best


def test_by_hand() -> None:
    """Two beams, end 9. Step 1 keeps a, b; step 2 ends a with -0.6 and goes on with aa (-0.9) and b's b (-1.4)."""
    half = BeamSearch(2, 3, 1.0, frozenset({9}))
    assert half.num_candidates == 3
    assert half.advance([Candidates([1, 2, 3], [-0.5, -0.9, -2.0])]) == [(0, 1), (0, 2)]
    first = [Candidates([9, 1, 2], [-0.1, -0.4, -3.0]), Candidates([2, 9, 1], [-0.5, -1.5, -2.0])]
    assert half.advance(first) == [(0, 1), (1, 2)]
    assert [(beam.token_ids, half.score(beam)) for beam in half.best()] == [([1, 9], pytest.approx(-0.3))]
    assert half.advance([Candidates([4, 9, 5], [-0.3, -2.0, -4.0]), Candidates([9, 4, 5], [-0.1, -4.0, -5.0])]) == []
    results = [(beam.token_ids, half.score(beam)) for beam in half.best()]
    assert results == [([1, 9], pytest.approx(-0.3)), ([1, 1, 4], pytest.approx(-0.4))]
    assert half.is_done and half.beams == []
    assert [beam.logprob for beam in half.best()[1].path()] == [-0.5, -0.4, -0.3]
    assert half.best()[0].path()[1].candidates is first[0]


def test_it_stops_when_nothing_can_get_better() -> None:
    """One beam, end 9: an end more likely than all that goes on is final at once."""
    one = BeamSearch(1, 50, 1.0, frozenset({9}))
    assert one.advance([Candidates([9, 1], [-0.1, -2.5])]) == []
    assert one.is_done
    other = BeamSearch(1, 50, 1.0, frozenset({9}))
    assert other.advance([Candidates([1, 9], [-0.1, -2.5])]) == [(0, 1)]
    assert not other.is_done and other.best() == []


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        ({"beam_width": 0}, ValueError, "beam_width"),
        ({"beam_width": 2.0}, TypeError, "beam_width"),
        ({"max_tokens": 0}, ValueError, "max_tokens"),
        ({"max_tokens": None}, TypeError, "max_tokens"),
        ({"temperature": -1}, ValueError, "temperature"),
        ({"length_penalty": math.nan}, ValueError, "length_penalty"),
        ({"length_penalty": -2000.0}, ValueError, "length_penalty"),
        ({"length_penalty": "1"}, TypeError, "length_penalty"),
        ({"structured_outputs": {}}, ValueError, "structured_outputs"),
    ],
)
def test_bad_parameters_are_named(arguments: dict[str, Any], error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=name):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4} | arguments)
