"""Lookahead decoding: its window is Jacobi iteration, its n-grams are what the model drew, no ids change."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from jaxinfer.engine.draft import Draft
from jaxinfer.engine.plan import DraftOutcome
from jaxinfer.engine.request import Request
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.speculation.lookahead import LookaheadProposer, LookaheadShape
from jaxinfer.speculation.ngram_pool import NgramPool
from tests.speculation.conftest import Bench, assert_same_logprobs, eight, serve, summary, token_ids

Model = Callable[[Sequence[int]], int]


def request_of(*prompt: int) -> Request:
    return Request("r", list(prompt), SamplingParams(temperature=0), 0.0, 1000)


def step(proposer: LookaheadProposer, request: Request, model: Model, count: int = 100) -> tuple[Draft, list[int]]:
    """What a step of the engine does: the draft, and the tokens that the request got."""
    (draft,) = proposer.propose([(request, count)])
    known = request.token_ids(0, request.num_known_tokens)
    drawn = tuple(model([*known, *draft.guessed(index)]) for index in range(-1, len(draft.token_ids)))
    path = draft.held(lambda parent, token: drawn[1 + parent] == token)
    new = [drawn[0], *(drawn[1 + index] for index in path)]
    request.output_token_ids.append(new[0])
    proposer.observe([DraftOutcome(request, draft, path, drawn)])
    request.output_token_ids += new[1:]
    return draft, new


def successor(tokens: Sequence[int]) -> int:
    return (tokens[-1] + 1) % 50


def mixed(tokens: Sequence[int]) -> int:
    """Depends on all tokens, and their order."""
    return sum((index + 1) * token for index, token in enumerate(tokens[::-1])) % 11


@pytest.mark.parametrize("shape", [(4, 5, 4), (1, 2, 1), (3, 2, 2), (1, 4, 2), (5, 3, 1)])
def test_a_window_of_the_papers_form(shape: tuple[int, int, int]) -> None:
    """W columns: the oldest tokens follow the root one after the other, and each column goes on from its own of them:
    token i of level j is i + j behind the root, and has j + i tokens before it."""
    window, ngram, _ = shape
    look = LookaheadShape(*shape)
    draft, _ = step(LookaheadProposer(look, from_text=False), request_of(3, 1, 4), mixed)
    assert len(draft.token_ids) == look.window_tokens == window * (ngram - 1) - 1
    where = {(0, 0): -1} | {(0, column): column - 1 for column in range(1, window)}
    for level in range(1, ngram - 1):
        where |= {(level, column): level * window - 1 + column for column in range(window)}
    for (level, column), index in where.items():
        if index >= 0:
            assert draft.depths()[index] == level + column
            assert draft.parent(index) == (where[level - 1, column] if level else where[0, column - 1])
    assert look.depth >= draft.depth


def test_the_window_is_jacobi_iteration() -> None:
    """By hand, one token a step: column i of the next window is column i of this one without its oldest token and with
    what was drawn behind it. The n-grams that this makes begin with the first tokens of the columns."""
    shape = LookaheadShape(3, 4, 8)
    proposer, request = LookaheadProposer(shape, from_text=False), request_of(7, 2, 9)
    columns: list[list[int]] | None = None
    for age in range(1, 9):
        known = request.token_ids(0, request.num_known_tokens)
        draft, new = step(proposer, request, mixed, count=shape.window_tokens)
        tokens = draft.token_ids[-shape.window_tokens :]
        levels = [[known[-1], *tokens[:2]], tokens[2:5], tokens[5:8]]
        seen = [[level[column] for level in levels] for column in range(3)]
        if columns is not None:
            # The first column's oldest token is known by now.
            assert [column[1:] for column in seen] == [column[1:] for column in columns]
            assert [column[0] for column in seen[1:]] == [column[0] for column in columns[1:]]
        drawn = [mixed([*known, *(c[0] for c in seen[1 : i + 1]), *seen[i][1:]]) for i in range(3)]
        made = [[*column, token] for column, token in zip(seen, drawn, strict=True)]
        for ngram in made:
            assert (tuple(ngram[1:]) in proposer._sights[request].pool.after(ngram[0])) == (age >= 3)
        columns = [ngram[1:] for ngram in made]
        shift = len(new) - 1
        columns = columns[shift:] + columns[:shift]


def test_columns_that_were_overtaken_begin_anew_at_the_end() -> None:
    """Each step moves the window by the token that it is sure to bring; of two, one column is behind the text."""
    proposer, request = LookaheadProposer(LookaheadShape(4, 3, 1), from_text=False), request_of(7, 2, 9)
    proposer.propose([(request, 7)])
    proposer._sights[request].window = np.array([[10, 20, 30, 40], [11, 21, 31, 41]])
    request.output_token_ids += [1, 2]
    (draft,) = proposer.propose([(request, 7)])
    assert draft.token_ids == (30, 40, 10, 21, 31, 41, 11)
    request.output_token_ids += [4]
    assert proposer.propose([(request, 7)])[0] == draft


@pytest.mark.parametrize("shape", [(2, 2, 1), (3, 5, 2), (4, 3, 2)])
def test_what_the_model_knows_is_found_without_any_text(shape: tuple[int, int, int]) -> None:
    """A model that counts: n-grams are right wherever they were made, so soon every step brings N tokens."""
    proposer, request = LookaheadProposer(LookaheadShape(*shape), from_text=False), request_of(3, 40)
    lengths = [len(step(proposer, request, successor)[1]) for _ in range(60)]
    assert request.output_token_ids == [(41 + index) % 50 for index in range(sum(lengths))]
    assert sum(lengths[:4]) < 8 or shape[1] == 2
    assert min(lengths[-10:]) >= min(shape[1], 2) and max(lengths[-10:]) == shape[1]


def test_guesses_come_first_and_share_their_beginnings() -> None:
    proposer = LookaheadProposer(LookaheadShape(2, 4, 3))
    (draft,) = proposer.propose([(request_of(5, 1, 2, 3, 5, 1, 2, 4, 5, 8, 8, 8, 5), 100)])
    assert draft.token_ids[:7] == (8, 8, 8, 1, 2, 4, 3)
    assert draft.parents[:7] == (-1, 0, 1, -1, 3, 4, 4)
    assert len(draft.token_ids) == 7 + 5


def test_with_little_room_it_guesses_without_a_window() -> None:
    proposer = LookaheadProposer(LookaheadShape(2, 4, 3))
    request = request_of(5, 1, 2, 3, 5, 1, 2, 4, 5)
    assert proposer.propose([(request, 4)])[0].token_ids == (1, 2, 4, 3)
    assert proposer.propose([(request, 3)])[0].token_ids == (1, 2, 4)
    assert not proposer.propose([(request, 2)])[0].token_ids
    assert not LookaheadProposer(LookaheadShape(2, 4, 3), from_text=False).propose([(request, 4)])[0].token_ids


def test_a_draft_that_was_verified_in_part_teaches_nothing() -> None:
    proposer, request = LookaheadProposer(LookaheadShape(2, 3, 1), from_text=False), request_of(4, 2)
    (draft,) = proposer.propose([(request, 9)])
    before = proposer._sights[request].window.copy()
    part = draft.only([0])
    proposer.observe([DraftOutcome(request, part, (), (1, 1))])
    assert (proposer._sights[request].window == before).all()
    (again,) = proposer.propose([(request, 9)])
    assert again == draft


def test_the_pool_keeps_what_was_seen_last() -> None:
    pool = NgramPool(2)
    pool.add_text([1, 2, 3, 1, 4, 3, 1, 5], 3)
    assert pool.after(1) == [(4, 3), (2, 3)] and pool.after(9) == []
    pool.add((1, 2, 3))
    pool.add((1, 6, 6))
    assert pool.after(1) == [(6, 6), (2, 3)]


@pytest.mark.parametrize("field", ["window_size", "ngram_size", "guess_set_size"])
def test_sizes_that_cannot_be(field: str) -> None:
    sizes = {"window_size": 2, "ngram_size": 3, "guess_set_size": 1} | {field: 0}
    with pytest.raises(ValueError, match=f"{field}=0"):
        LookaheadShape(*sizes.values())
    with pytest.raises(ValueError, match="ngram_size=1"):
        LookaheadShape(2, 1, 1)


SHAPES = {1: (4, 2, 3), 3: (2, 4, 3), 5: (1, 6, 2), 8: (1, 9, 1)}
"""By the tokens that a step may bring beside one."""


@pytest.mark.parametrize("tokens", SHAPES)
@pytest.mark.parametrize("from_text", [True, False])
def test_ids_are_those_of_plain_decoding(trees: Bench, plain: Any, tokens: int, from_text: bool) -> None:
    shape = LookaheadShape(*SHAPES[tokens])
    engine = trees.engine(LookaheadProposer(shape, from_text), shape.tokens, tree_depth=shape.depth)
    assert summary(serve(engine, eight())) == summary(plain)
    stats = engine.stats().speculation
    assert stats is not None and stats.acceptance_length > 1.0


def test_in_a_small_pool_and_alone(trees: Bench, plain: Any) -> None:
    shape = LookaheadShape(2, 4, 3)
    fields = {"tokens": shape.tokens, "tree_depth": shape.depth}
    engine = trees.engine(LookaheadProposer(shape), **fields, blocks=36)
    assert summary(serve(engine, eight())) == summary(plain)
    assert engine.stats().num_preemptions > 0
    for index in (1, 2):
        alone = serve(trees.engine(LookaheadProposer(shape), **fields), [eight()[index]])
        assert token_ids(alone)["0"] == token_ids(plain)[str(index)]


def test_every_sampling_parameter_sees_the_path_before_its_position(trees: Bench, specials: Any) -> None:
    """Field cases 1 and 24."""
    requests, expected = specials
    shape = LookaheadShape(2, 4, 3)
    served = serve(trees.engine(LookaheadProposer(shape), shape.tokens, tree_depth=shape.depth), requests)
    assert summary(served) == summary(expected)
    for request_id, output in served.items():
        assert_same_logprobs(output, expected[request_id])
