"""The reference for beam search: whole matrices, no requests and no cache."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest


def naive(
    model: Callable[[Sequence[int]], np.ndarray], width: int, max_tokens: int, penalty: float, ends: set[int]
) -> list[tuple[list[int], float]]:
    """The published rule over whole [beams, vocabulary] matrices, -1e9 standing for what is not there."""
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    kept: list[tuple[list[int], float]] = []
    for length in range(1, max_tokens + 1):
        table = np.stack([model(ids) + total for ids, total in beams])
        order = np.argsort(-table, axis=None, kind="stable")[: max(2, 1 + len(ends)) * width]
        top = [([*beams[i // table.shape[1]][0], int(i % table.shape[1])], float(table.flat[i])) for i in order]
        stops = [ids[-1] in ends or length == max_tokens for ids, _ in top]
        fresh = [(ids, total / length**penalty) for (ids, total), stop in zip(top[:width], stops, strict=False) if stop]
        kept = sorted(kept + fresh, key=lambda entry: -entry[1])[:width]
        beams = [entry for entry, stop in zip(top, stops, strict=True) if not stop][:width]
        worst = kept[-1][1] if len(kept) == width else -1e9
        if not beams or beams[0][1] / length**penalty <= worst:
            break
    return kept


@pytest.fixture(scope="session")
def naive_beam_search() -> Callable[..., list[tuple[list[int], float]]]:
    """`naive(model, width, max_tokens, penalty, ends)` gives (ids, score), best first."""
    return naive
