"""Texts laid into rows, and the order of the rows."""

import numpy as np
import pytest

from jaxinfer.training.packing import PADDING, batch_rows, pack, predicted


def test_texts_share_rows_and_go_on_in_the_next() -> None:
    rows = pack([[1, 2, 3], [4, 5, 6, 7, 8], [9], [10, 11, 12, 13]], 5)
    assert rows.ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 10, 11], [12, 13, 0, 0, 0]]
    pad = PADDING
    assert rows.segments.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 1, 1], [0, 0, pad, pad, pad]]
    assert predicted(rows.segments).sum(axis=1).tolist() == [3, 3, 1]


def test_openings_are_not_counted() -> None:
    rows = pack([[1, 2, 3], [4, 5, 6, 7, 8], [9], [10, 11, 12]], 5, openings=[1, 3, 1, 0])
    assert rows.counted is not None
    assert rows.counted.astype(int).tolist() == [[0, 1, 1, 0, 0], [0, 1, 1, 1, 1]]
    rows = rows.rows(np.array([1])).filled(2)
    assert rows.batch()["counted"].astype(int).tolist() == [[0, 1, 1, 1, 1], [0] * 5]
    assert (rows.ids[1].tolist(), rows.segments[1].tolist()) == ([0] * 5, [PADDING] * 5)
    assert "counted" not in pack([[1, 2]], 5).batch()


def test_a_last_place_is_not_filled() -> None:
    """One token at the end of a row would neither be predicted nor predict."""
    rows = pack([[1, 2, 3], [4, 5]], 4)
    assert rows.ids.tolist() == [[1, 2, 3, 0], [4, 5, 0, 0]]


@pytest.mark.parametrize(("texts", "length", "message"), [([[1], []], 4, "no text of two"), ([[1, 2]], 1, "length=1")])
def test_refusals(texts: list[list[int]], length: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(texts, length)


def test_every_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    batches = [batch_rows(6, 4, step, seed=1) for step in range(6)]
    epochs = np.concatenate(batches).reshape(4, 6)
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) > 1
    assert batch_rows(6, 4, 4, seed=1).tolist() == batches[4].tolist()
    assert batch_rows(6, 4, 4, seed=2).tolist() != batches[4].tolist()
