"""Texts of any length as rows of one length."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

PADDING = -1
"""Segment of the places behind the last text of a row."""


@dataclass(frozen=True)
class PackedRows:
    """Rows of tokens in which several texts may lie end to end.

    Attributes:
        ids: int32[R, T]; 0 in padding.
        segments: int32[R, T]: 0, 1, ... for the texts of a row, `PADDING` behind them.
        counted: bool[R, T], which tokens are to be predicted; None for all. The others are seen and not learned.
    """

    ids: np.ndarray
    segments: np.ndarray
    counted: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.ids.shape != self.segments.shape or self.ids.ndim != 2:
            raise ValueError(f"ids {self.ids.shape} and segments {self.segments.shape} must be of one shape [R, T]")
        if self.counted is not None and self.counted.shape != self.ids.shape:
            raise ValueError(f"counted {self.counted.shape} must be of the shape of ids, {self.ids.shape}")

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, which: np.ndarray) -> "PackedRows":
        """Those rows, in that order."""
        counted = None if self.counted is None else self.counted[which]
        return PackedRows(self.ids[which], self.segments[which], counted)

    def batch(self) -> dict[str, np.ndarray]:
        """The rows by the names that losses know: "ids", "segments", and "counted" where not all tokens are."""
        named = {"ids": self.ids, "segments": self.segments}
        return named if self.counted is None else {**named, "counted": self.counted}

    def filled(self, size: int) -> "PackedRows":
        """These rows and as many empty ones as are missing to `size`."""
        missing = [(0, size - len(self)), (0, 0)]
        counted = None if self.counted is None else np.pad(self.counted, missing)
        return PackedRows(np.pad(self.ids, missing), np.pad(self.segments, missing, constant_values=PADDING), counted)


def pack(texts: Iterable[Sequence[int]], length: int, openings: Sequence[int] | None = None) -> PackedRows:
    """Lays texts end to end into rows, in their order; what does not fit any more goes on in the next row.

    Every row is full but the last. A piece that is cut off from its beginning does not see it; a piece of a single
    token, which predicts nothing and is predicted by nothing, is left out.

    Args:
        texts: token ids of each.
        length: tokens of a row, at least 2.
        openings: for each text, how many of its first tokens are not counted; None counts all.

    Raises:
        ValueError: `length` is below 2, or there is nothing to learn from.
    """
    if length < 2:
        raise ValueError(f"length={length} must be at least 2: a row predicts its second token from its first")
    rows: list[tuple[list[int], list[int], list[bool]]] = []
    ids: list[int] = []
    segments: list[int] = []
    counted: list[bool] = []
    number = 0
    for place, text in enumerate(texts):
        opening = openings[place] if openings is not None else 0
        rest = list(text)
        while len(rest) > 1:
            room = length - len(ids)
            done = len(text) - len(rest)
            counted += [done + index >= opening for index in range(len(rest[:room]))]
            ids += rest[:room]
            segments += [number] * (len(ids) - len(segments))
            rest, number = rest[room:], number + 1
            if length - len(ids) < 2:
                rows.append((ids, segments, counted))
                ids, segments, counted, number = [], [], [], 0
    if ids:
        rows.append((ids, segments, counted))
    if not rows:
        raise ValueError("the data has no text of two tokens or more, so there is nothing to learn from")
    packed_ids, packed_segments = np.zeros((len(rows), length), np.int32), np.full((len(rows), length), PADDING)
    packed_counted = np.zeros((len(rows), length), bool)
    for row, (tokens, numbers, counts) in enumerate(rows):
        packed_ids[row, : len(tokens)] = tokens
        packed_segments[row, : len(tokens)] = numbers
        packed_counted[row, : len(tokens)] = counts
    return PackedRows(packed_ids, packed_segments.astype(np.int32), None if openings is None else packed_counted)


def predicted(segments: np.ndarray) -> np.ndarray:
    """bool[R, T - 1]: whether a token's successor is of its own text."""
    return (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != PADDING)


def batch_rows(count: int, batch_size: int, step: int, seed: int) -> np.ndarray:
    """Which rows step number `step` (from 0) trains on: int64[batch_size].

    Epochs follow one another without a break, each in an order of its own that depends on the seed; a function of the
    step alone, so that a run goes on where it was killed.
    """
    places = step * batch_size + np.arange(batch_size)
    epochs = places // count
    orders = {epoch: np.random.default_rng([seed, epoch]).permutation(count) for epoch in np.unique(epochs).tolist()}
    return np.array([orders[epoch][place % count] for epoch, place in zip(epochs.tolist(), places, strict=True)])
