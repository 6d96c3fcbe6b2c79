"""Block copies: what a plan wants copied, cut into calls of the one copy program."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

COPIES_A_CALL = 8
"""Pairs of blocks the program copies at once; what is missing is filled up with copies of the sink onto itself."""


def copy_calls(copies: Iterable[tuple[int, int]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Source and target ids of each call, int32[COPIES_A_CALL], such that the calls one after the other do what the
    copies do one after the other: within a call no block is a target twice, or both source and target.

    Args:
        copies: (source, target), in order.
    """
    pairs: list[tuple[int, int]] = []
    for source, target in copies:
        touched = {block for pair in pairs for block in pair}
        written = {block for _, block in pairs}
        if len(pairs) == COPIES_A_CALL or source in written or target in touched:
            yield _padded(pairs)
            pairs = []
        pairs.append((source, target))
    if pairs:
        yield _padded(pairs)


def _padded(pairs: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.zeros((2, COPIES_A_CALL), np.int32)
    ids[:, : len(pairs)] = np.transpose(pairs)
    return ids[0], ids[1]
