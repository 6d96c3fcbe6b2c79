"""Slot moves: what a plan wants moved within the pool, cut into calls of the one program for it."""

from collections.abc import Iterator, Sequence

import numpy as np

MOVES_A_CALL = 32
"""Slots the program moves at once; what is missing is filled up with a slot of the sink that stays where it is."""


def move_calls(moves: Sequence[tuple[int, int]]) -> Iterator[np.ndarray]:
    """int32[2, MOVES_A_CALL], sources and targets of each call.

    A call reads all its sources before it writes. Of several calls one may not write what a later one reads: the moves
    of a request go to slots before those that they come from, in order, and requests have slots of their own.

    Args:
        moves: (source, target).
    """
    for start in range(0, len(moves), MOVES_A_CALL):
        part = moves[start : start + MOVES_A_CALL]
        slots = np.zeros((2, MOVES_A_CALL), np.int32)
        slots[:, : len(part)] = np.transpose(part)
        yield slots
