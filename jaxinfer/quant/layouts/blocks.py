"""Scales of blocks of a matrix, as a scale for each group of a channel's inputs. NumPy."""

import math

import numpy as np

from jaxinfer.quant.storage import SMALLEST_GROUP


def group_in_blocks(block: int, row: int, runs_on: bool) -> int:
    """The largest group that divides a channel and over which no border of a block runs.

    Args:
        block: inputs of a block.
        row: K, a channel's inputs.
        runs_on: whether a channel begins in the middle of a block where the one before ends there; else each begins
            with a block of its own.

    Raises:
        ValueError: it is smaller than `SMALLEST_GROUP` and would need about as many bytes for scales as for codes.
    """
    group = row if not runs_on and row <= block else math.gcd(block, row)
    if group < min(SMALLEST_GROUP, row):
        raise ValueError(
            f"blocks of {block} on channels of {row} inputs would need groups of {group}, which is not supported: the "
            f"least is {SMALLEST_GROUP}. Load the unquantised checkpoint"
        )
    return group


def over_rectangles(scale: np.ndarray, block: tuple[int, int], channels: int, row: int) -> np.ndarray:
    """Scales of rectangles, which end where the matrix does, ``[ceil(N / block[0]), ceil(K / block[1])]``, as those of
    the groups of `group_in_blocks`: ``[N, K / group]``."""
    group = group_in_blocks(block[1], row, runs_on=False)
    columns = np.arange(0, row, group) // block[1]
    return np.repeat(scale[:, columns], block[0], axis=0)[:channels]


def over_runs(scale: np.ndarray, block: int, channels: int, row: int) -> np.ndarray:
    """Scales of runs through the whole matrix in C order, ``[ceil(N * K / block)]``, as those of the groups of
    `group_in_blocks`: ``[N, K / group]``."""
    group = group_in_blocks(block, row, runs_on=True)
    if group == block:
        return scale.reshape(channels, row // group)
    return scale[np.arange(0, channels * row, group) // block].reshape(channels, row // group)


def rectangles_of(values: np.ndarray, block: tuple[int, int], channels: int, row: int) -> np.ndarray:
    """The inverse of `over_rectangles`: one of each rectangle's values ``[N, K / group]`` of any group.

    Raises:
        ValueError: they are not the same all over a rectangle.
    """
    group = row // values.shape[1]
    firsts = np.arange(0, row, block[1])
    found = values[:: block[0], firsts // group]
    step = math.gcd(group, block[1]) if block[1] < row else group
    positions = np.arange(0, row, step)
    whole = np.repeat(found, block[0], axis=0)[:channels, positions // block[1]]
    if not np.array_equal(whole, values[:, positions // group]):
        raise ValueError(f"scales differ within {block[0]} outputs by {block[1]} inputs, which share one here")
    return np.ascontiguousarray(found)
