"""Writing safetensors files in Hugging Face's names: the family's weight table, read backwards."""

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from jaxinfer.checkpoint.hf_directory import INDEX, SINGLE
from jaxinfer.checkpoint.safetensors import DTYPES
from jaxinfer.checkpoint.weight_map import Slot, expected_weights
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.family import Family

ALIGNMENT = 8  # of the data in a file, as the safetensors library has it
STORED = {name: (stored, np.dtype(storage)) for stored, (name, storage) in DTYPES.items()}


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written: its name and shape in the file, and the parts of a parameter that it is made of, in the
    order of its rows."""

    name: str
    shape: tuple[int, ...]
    slots: tuple[Slot, ...]
    nbytes: int


def write_safetensors(
    folder: Path,
    family: Family,
    config: ModelConfig,
    dtype: str,
    stream: Iterable[tuple[str, np.ndarray]],
    *,
    leaves: Sequence[str],
    max_shard_bytes: int,
) -> int:
    """Writes model.safetensors, or several shards and their index, a parameter at a time.

    Args:
        folder: where the files go.
        family: its weight table names the tensors.
        config: the architecture.
        dtype: what the values are written as: "float32", "bfloat16" or "float16".
        stream: path and values of every parameter.
        leaves: the paths in the order of the stream.
        max_shard_bytes: a shard holds no more, unless it is a single tensor.

    Returns:
        Bytes of the tensors.

    Raises:
        ValueError: a parameter is not in the family's table, or is misshapen.
    """
    plan = _plan(family, config, STORED[dtype][1].itemsize)
    unnamed = sorted(set(leaves) ^ set(plan))
    if unnamed:
        raise ValueError(f"parameter {unnamed[0]!r} and the weight table of {family.name} do not fit together")
    writer = _ShardWriter(folder, [tensor for leaf in leaves for tensor in plan[leaf]], dtype, max_shard_bytes)
    with writer:
        for leaf, values in stream:
            for tensor in plan[leaf]:
                writer.write(tensor, values)
    return writer.finish()


def _plan(family: Family, config: ModelConfig, itemsize: int) -> dict[str, list[PlannedTensor]]:
    """Leaf path -> the tensors it is split into."""
    slots: dict[str, list[Slot]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, weight, slot in expected_weights(family, config, "hf"):
        slots.setdefault(name, []).append(slot)
        shapes[name] = weight.tensor_shape(config)
    plan: dict[str, list[PlannedTensor]] = {}
    for name, parts in slots.items():
        in_order = tuple(sorted(parts, key=lambda slot: slot.first_row))
        tensor = PlannedTensor(name, shapes[name], in_order, math.prod(shapes[name]) * itemsize)
        plan.setdefault(parts[0].leaf, []).append(tensor)
    return plan


class _ShardWriter:
    """Writes tensors in the order in which they were planned, opening one file after the other."""

    def __init__(self, folder: Path, tensors: Sequence[PlannedTensor], dtype: str, max_shard_bytes: int) -> None:
        self._folder = folder
        self._stored, self._dtype = STORED[dtype]
        self._shards = _shards(tensors, max_shard_bytes)
        self._waiting = [(tensor, number) for number, shard in enumerate(self._shards) for tensor in shard]
        self._next = 0
        self._open = -1
        self._file: IO[bytes] | None = None

    def __enter__(self) -> "_ShardWriter":
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, tensor: PlannedTensor, leaf: np.ndarray) -> None:
        """Writes the tensor's part of the leaf."""
        expected, number = self._waiting[self._next]
        if tensor is not expected:
            raise ValueError(f"tensor {tensor.name!r} comes where {expected.name!r} was planned")
        if number != self._open:
            self._begin(number)
        assert self._file is not None
        for slot in tensor.slots:
            if slot.view(leaf).size != math.prod(slot.shape):
                found = list(slot.view(leaf).shape)
                raise ValueError(f"the part of {tensor.name!r} is {found}, which is not {list(slot.shape)}")
            values = np.ascontiguousarray(slot.tensor_rows(leaf), self._dtype)
            self._file.write(values.reshape(-1).view(np.uint8).data)
        self._next += 1

    def finish(self) -> int:
        """Writes the index where there are several shards; returns the bytes of all tensors.

        Raises:
            ValueError: not every tensor has been written.
        """
        if self._next != len(self._waiting):
            raise ValueError(f"tensor {self._waiting[self._next][0].name!r} was not written")
        total = sum(tensor.nbytes for tensor, _ in self._waiting)
        if len(self._shards) > 1:
            names = {tensor.name: self._name(number) for tensor, number in self._waiting}
            content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
            (self._folder / INDEX).write_text(json.dumps(content, indent=2), encoding="utf-8")
        return total

    def _name(self, number: int) -> str:
        count = len(self._shards)
        return SINGLE if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"

    def _begin(self, number: int) -> None:
        if self._file is not None:
            self._file.close()
        self._open, self._file = number, (self._folder / self._name(number)).open("wb")
        self._file.write(_header(self._shards[number], self._stored))


def _shards(tensors: Sequence[PlannedTensor], max_bytes: int) -> list[list[PlannedTensor]]:
    shards: list[list[PlannedTensor]] = [[]]
    held = 0
    for tensor in tensors:
        if shards[-1] and held + tensor.nbytes > max_bytes:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += tensor.nbytes
    return shards


def _header(tensors: Sequence[PlannedTensor], stored: str) -> bytes:
    entries: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt"}}  # transformers looks for it
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        entries[tensor.name] = {"dtype": stored, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
