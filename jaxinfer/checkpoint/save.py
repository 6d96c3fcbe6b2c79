"""Writing safetensors files in Hugging Face's names: the family's weight table, read backwards."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from jaxinfer.checkpoint.shards import FileTensor, header, shard_name, split, write_index
from jaxinfer.checkpoint.weight_map import Slot, expected_weights
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.family import Family


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written, and the parts of a parameter that it is made of, in the order of its rows."""

    file: FileTensor
    slots: tuple[Slot, ...]


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
    plan = plan_tensors(family, config, dtype)
    unnamed = sorted(set(leaves) ^ set(plan))
    if unnamed:
        raise ValueError(f"parameter {unnamed[0]!r} and the weight table of {family.name} do not fit together")
    writer = _ShardWriter(folder, [tensor for leaf in leaves for tensor in plan[leaf]], max_shard_bytes)
    with writer:
        for leaf, values in stream:
            for tensor in plan[leaf]:
                writer.write(tensor, values)
    return writer.finish()


def plan_tensors(family: Family, config: ModelConfig, dtype: str) -> dict[str, list[PlannedTensor]]:
    """Leaf path -> the tensors it is split into, in the family's names and of that dtype."""
    slots: dict[str, list[Slot]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, weight, slot in expected_weights(family, config, "hf"):
        slots.setdefault(name, []).append(slot)
        shapes[name] = weight.tensor_shape(config)
    plan: dict[str, list[PlannedTensor]] = {}
    for name, parts in slots.items():
        in_order = tuple(sorted(parts, key=lambda slot: slot.first_row))
        tensor = PlannedTensor(FileTensor(name, shapes[name], dtype), in_order)
        plan.setdefault(parts[0].leaf, []).append(tensor)
    return plan


class _ShardWriter:
    """Writes tensors in the order in which they were planned, opening one file after the other."""

    def __init__(self, folder: Path, tensors: Sequence[PlannedTensor], max_shard_bytes: int) -> None:
        self._folder = folder
        self._shards = split([tensor.file for tensor in tensors], max_shard_bytes)
        numbers = [number for number, shard in enumerate(self._shards) for _ in shard]
        self._waiting = list(zip(tensors, numbers, strict=True))
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
            raise ValueError(f"tensor {tensor.file.name!r} comes where {expected.file.name!r} was planned")
        if number != self._open:
            self._begin(number)
        assert self._file is not None
        for slot in tensor.slots:
            values = np.ascontiguousarray(part_rows(tensor.file.name, slot, leaf), tensor.file.numpy_dtype)
            self._file.write(values.reshape(-1).view(np.uint8).data)
        self._next += 1

    def finish(self) -> int:
        """Writes the index where there are several shards; returns the bytes of all tensors.

        Raises:
            ValueError: not every tensor has been written.
        """
        if self._next != len(self._waiting):
            raise ValueError(f"tensor {self._waiting[self._next][0].file.name!r} was not written")
        return write_index(self._folder, self._shards)

    def _begin(self, number: int) -> None:
        if self._file is not None:
            self._file.close()
        self._open, self._file = number, (self._folder / shard_name(number, len(self._shards))).open("wb")
        self._file.write(header(self._shards[number]))


def part_rows(name: str, slot: Slot, leaf: np.ndarray) -> np.ndarray:
    """The rows of the tensor of that name that this part of the parameter is.

    Raises:
        ValueError: the parameter is misshapen.
    """
    if slot.view(leaf).size != math.prod(slot.shape):
        raise ValueError(f"the part of {name!r} is {list(slot.view(leaf).shape)}, which is not {list(slot.shape)}")
    return slot.tensor_rows(leaf)
