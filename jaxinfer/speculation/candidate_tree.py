"""Trees of candidates: which combinations of several places' guesses are worth verifying. HOST: NumPy only."""

import heapq
from collections.abc import Sequence

import numpy as np

from jaxinfer.engine.draft import NO_DRAFT, Draft

Choices = tuple[tuple[int, ...], ...]
"""A tree of a fixed shape: each node is its path, at each place which candidate (0 the likeliest)."""


def best_tree(token_ids: np.ndarray, logprobs: np.ndarray, count: int) -> Draft:
    """The `count` nodes with the highest products of probability, the likeliest first.

    The places' guesses are taken to be independent of one another, so that a node's chance is the product of those on
    its path; a node is never likelier than its parent.

    Args:
        token_ids: int32[K, C], the candidates of each place, the likeliest first.
        logprobs: float32[K, C], their log-probabilities.
        count: nodes at most.
    """
    ids, scores = token_ids.tolist(), logprobs.tolist()
    places, width = len(ids), len(ids[0]) if ids else 0
    chosen: list[int] = []
    parents: list[int] = []
    # (-score, when it was found, place, candidate, parent, score of the parent); equals in the order they were found
    waiting = [(-scores[0][0], 0, 0, 0, -1, 0.0)] if places and width else []
    found = 1
    while waiting and len(chosen) < count:
        cost, _, place, rank, parent, above = heapq.heappop(waiting)
        node = len(chosen)
        chosen.append(ids[place][rank])
        parents.append(parent)
        if rank + 1 < width:
            heapq.heappush(waiting, (-(above + scores[place][rank + 1]), found, place, rank + 1, parent, above))
        if place + 1 < places:
            heapq.heappush(waiting, (cost - scores[place + 1][0], found + 1, place + 1, 0, node, -cost))
        found += 2
    return Draft(tuple(chosen), parents=tuple(parents)) if chosen else NO_DRAFT


def shaped_tree(token_ids: np.ndarray, logprobs: np.ndarray, count: int, choices: Choices) -> Draft:
    """The nodes of a given shape, or its `count` likeliest; the likeliest first.

    Args:
        token_ids, logprobs, count: as for `best_tree`.
        choices: checked by `check_choices`; no deeper than K, no candidate from C on.
    """
    ids, scores = token_ids.tolist(), logprobs.tolist()
    score = {path: sum(scores[place][rank] for place, rank in enumerate(path)) for path in choices}
    ordered = sorted(choices, key=lambda path: (-score[path], len(path), path))[:count]
    places = {path: index for index, path in enumerate(ordered)} | {(): -1}
    token = tuple(ids[len(path) - 1][path[-1]] for path in ordered)
    return Draft(token, parents=tuple(places[path[:-1]] for path in ordered)) if ordered else NO_DRAFT


def check_choices(choices: Sequence[Sequence[int]]) -> Choices:
    """The same as tuples.

    Raises:
        ValueError: a path is empty, there twice, has a number below 0, or lacks the node before its last.
        TypeError: they are no lists of numbers.
    """
    if not _is_list(choices) or not all(_is_list(path) for path in choices):
        raise TypeError(f"medusa_choices={choices!r} must be a list of paths, such as [[0], [1], [0, 0]]")
    for path in choices:
        if not path or any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in path):
            raise ValueError(f"medusa_choices holds {list(path)}; a path is one number from 0 up for each head it uses")
    paths = tuple(tuple(path) for path in choices)
    known = {(), *paths}
    if not paths or len(set(paths)) < len(paths):
        raise ValueError(f"medusa_choices={list(choices)} must be paths, each once, such as [[0], [1], [0, 0]]")
    for path in paths:
        if path[:-1] not in known:
            raise ValueError(f"medusa_choices holds {list(path)} without {list(path[:-1])}, which it follows; add that")
    return paths


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
