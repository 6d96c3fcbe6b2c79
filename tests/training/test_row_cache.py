"""The teacher's top tokens on disk."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.training import row_cache
from jaxinfer.training.packing import PackedRows, pack
from jaxinfer.training.row_cache import Scored, TopCache

ROWS = pack([list(range(i, i + 6)) for i in range(7)], 6)


def score(rows: PackedRows) -> Scored:
    """Numbers that tell which row they are of."""
    first = rows.ids[:, :-1]
    top = np.stack([first, first + 100], axis=-1)
    return {"top_ids": top, "top_logprobs": top.astype(np.float32) / 7, "tail": -first.astype(np.float32)}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], TopCache]:
    """Three rows a shard: 5 places of 2 tokens of 8 bytes, and a tail of 4."""
    monkeypatch.setattr(row_cache, "SHARD_BYTES", 3 * 6 * 20)
    return lambda: TopCache(tmp_path / "top", ROWS, 2, {"teacher": "me"})


def test_what_was_scored_is_read_in_any_order(cache: Callable[[], TopCache]) -> None:
    made = cache()
    assert made.missing == [0, 1, 2]
    counted: list[int] = []
    made.fill(score, 2, counted.append)
    assert counted == [2, 1, 2, 1, 1] and made.missing == []
    which = np.array([6, 0, 4, 4])
    found, expected = cache().read(which), score(ROWS.rows(which))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(found[name], values) and found[name].dtype == values.dtype


def test_a_killed_one_goes_on_with_what_is_missing(cache: Callable[[], TopCache]) -> None:
    calls: list[int] = []

    def until_killed(rows: PackedRows) -> Scored:
        calls.append(int(rows.ids[0, 0]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return score(rows)

    with pytest.raises(KeyboardInterrupt):
        cache().fill(until_killed, 3)
    assert cache().missing == [1, 2]
    cache().fill(until_killed, 3)
    assert calls == [0, 3, 3, 6] and cache().missing == []


def test_what_is_of_something_else_is_refused(cache: Callable[[], TopCache], tmp_path: Path) -> None:
    cache()
    with pytest.raises(ValueError, match="was made with k=2; this run has k=3"):
        TopCache(tmp_path / "top", ROWS, 3, {"teacher": "me"})
    with pytest.raises(ValueError, match="was made with data="):
        TopCache(tmp_path / "top", ROWS.rows(np.arange(6)), 2, {"teacher": "me"})
