"""What a model says at every place of the data, computed once and kept on disk: the teacher need not be in memory for
its most probable tokens, nor run again in every epoch for its hidden states."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checkpoint.output_directory import sync_entry
from jaxinfer.training.described_folder import describe_folder
from jaxinfer.training.packing import PackedRows

SHARD_BYTES = 64 << 20
Scored = Mapping[str, np.ndarray]
Score = Callable[[PackedRows], Scored]
"""Rows -> arrays ``[R, ...]`` by name."""


class RowCache:
    """A folder of safetensors shards with the same number of rows each; a shard appears when it is whole.

    Args:
        folder: where it is, or will be; another run with the same data and identity may use it.
        name: of what it holds, with which its files' names begin.
        rows: the data.
        token_bytes: what is kept for a token, at most.
        identity: of JSON's types: what else the numbers depend on, by names that users know.

    Raises:
        ValueError: the folder holds something else; names the difference.
    """

    def __init__(
        self, folder: Path, name: str, rows: PackedRows, token_bytes: int, identity: Mapping[str, Any]
    ) -> None:
        self._folder, self._name, self._rows = folder, name, rows
        self._per_shard = max(1, SHARD_BYTES // max(1, rows.ids.shape[1] * token_bytes))
        self._open: dict[int, Any] = {}
        own = {"data": digest(rows), "rows_per_shard": self._per_shard}
        describe_folder(folder, f"{name}.json", {**identity, **own})

    @property
    def missing(self) -> list[int]:
        """Numbers of the shards that are not there yet."""
        return [number for number in range(-(-len(self._rows) // self._per_shard)) if not self._path(number).is_file()]

    def fill(self, score: Score, batch_size: int, on_rows: Callable[[int], object] = lambda count: None) -> None:
        """Makes the shards that are missing.

        Args:
            score: what the model says of some rows.
            batch_size: rows that are scored at a time; the last ones of a shard are filled up by repeating one.
            on_rows: told how many rows have been scored.
        """
        from safetensors.numpy import save_file

        for number in self.missing:
            which = np.arange(number * self._per_shard, min((number + 1) * self._per_shard, len(self._rows)))
            parts = []
            for first in range(0, len(which), batch_size):
                part = which[first : first + batch_size]
                padded = np.pad(part, (0, batch_size - len(part)), mode="edge")
                found = score(self._rows.rows(padded))
                parts.append({name: np.asarray(values)[: len(part)] for name, values in found.items()})
                on_rows(len(part))
            shard = {name: np.ascontiguousarray(np.concatenate([part[name] for part in parts])) for name in parts[0]}
            fresh = self._path(number).with_suffix(".new")
            save_file(shard, fresh)
            sync_entry(fresh)
            fresh.replace(self._path(number))

    def read(self, which: np.ndarray) -> dict[str, np.ndarray]:
        """What is kept of those rows, in that order; all shards must be there."""
        found = [self._row(int(row)) for row in which]
        return {name: np.stack([row[name] for row in found]) for name in found[0]}

    def _row(self, row: int) -> dict[str, np.ndarray]:
        from safetensors import safe_open

        number, place = divmod(row, self._per_shard)
        if number not in self._open:
            self._open[number] = safe_open(self._path(number), framework="numpy")
        shard = self._open[number]
        return {name: shard.get_slice(name)[place] for name in shard.keys()}  # noqa: SIM118 (no mapping)

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._name}_{number:05}.safetensors"


class TopCache(RowCache):
    """A teacher's most probable tokens: "top_ids" int32[R, T - 1, k], "top_logprobs" float32[R, T - 1, k] and "tail"
    float32[R, T - 1], see `jaxinfer.training.losses.top_logprobs`.

    Args:
        folder, rows, identity: as for `RowCache`.
        k: tokens of each place.
    """

    def __init__(self, folder: Path, rows: PackedRows, k: int, identity: Mapping[str, Any]) -> None:
        super().__init__(folder, "top", rows, 8 * k + 4, {**identity, "k": k})


def digest(rows: PackedRows) -> str:
    """A name for exactly these rows."""
    found = hashlib.sha256(str(rows.ids.shape).encode())
    for array in (rows.ids, rows.segments):
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()[:32]
