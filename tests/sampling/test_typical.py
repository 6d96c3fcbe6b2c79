"""Typical acceptance against a walk over all paths in NumPy."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import TypicalAcceptance
from jaxinfer.sampling.typical import GuessedRows, typical_tokens

V = 12


def naive(shares: np.ndarray, parents: list[int], tokens: list[int], rule: TypicalAcceptance) -> list[int]:
    """The guesses that are kept, by what the paper's rule says of every path."""

    def holds(node: int) -> bool:
        p = shares[1 + parents[node]]
        entropy = -sum(x * np.log(x) for x in p if x > 0)
        bound = min(rule.posterior_threshold, rule.posterior_alpha * np.exp(-entropy))
        return bool(p[tokens[node]] > bound)

    best: tuple[int, float, list[int]] = (0, 0.0, [])
    for node in range(len(tokens)):
        path, at = [], node
        while at >= 0:
            path.append(at)
            at = parents[at]
        path = path[::-1]
        if all(map(holds, path)):
            likelihood = sum(np.log(shares[1 + parents[one]][tokens[one]]) for one in path)
            best = max(best, (len(path), likelihood, path), key=lambda entry: entry[:2])
    return best[2]


def walked(drawn: np.ndarray, first: int, parents: list[int], tokens: list[int]) -> list[int]:
    """What the engine keeps of a tree whose root is row `first`: from the root to the child that was drawn."""
    at, path = -1, []
    while True:
        children = [i for i, parent in enumerate(parents) if parent == at and tokens[i] == drawn[first + 1 + at]]
        if not children:
            return path
        at = children[0]
        path.append(at)


def random_tree(rng: np.random.Generator, count: int) -> tuple[list[int], list[int]]:
    """Siblings are different tokens."""
    parents: list[int] = []
    tokens: list[int] = []
    while len(tokens) < count:
        parent, token = int(rng.integers(-1, len(tokens))), int(rng.integers(V))
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
    return parents, tokens


@pytest.mark.parametrize("rule", [TypicalAcceptance(), TypicalAcceptance(0.3, 0.2), TypicalAcceptance(0.02, 1.0)])
def test_the_longest_typical_path_and_of_equals_the_likeliest(rule: TypicalAcceptance) -> None:
    rng = np.random.default_rng(1)
    lengths = []
    for _ in range(20):
        logits = rng.normal(0, 2, (16, V)).astype(np.float32)
        logits[:, 3] = -np.inf  # left out by a filter, say
        trees = [random_tree(rng, 6), random_tree(rng, 6)]
        parent, token = np.full(16, -1), np.zeros(16, int)
        for first, (parents, tokens) in zip((1, 8), trees, strict=True):
            parent[first + 1 : first + 7], token[first + 1 : first + 7] = np.array(parents) + first + 1, tokens
        drawn = rng.integers(V, V + 4, 16)  # never a guess
        random = np.ones(16, bool)
        random[8:] = False
        found = np.asarray(
            typical_tokens(
                jnp.asarray(drawn),
                jnp.asarray(logits),
                jnp.asarray(random),
                GuessedRows(*_arrays(parent, token)),
                rule,
                6,
            )
        )
        shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        expected = naive(shares[1:8], *trees[0], rule)
        assert walked(found, 1, *trees[0]) == expected
        assert (found[8:] == drawn[8:]).all() and found[0] == drawn[0]
        lengths.append(len(expected))
    assert max(lengths) >= 3 and 0 < np.mean(lengths) < 4


def _arrays(*values: np.ndarray) -> tuple[Any, ...]:
    return tuple(jnp.asarray(value, jnp.int32) for value in values)
