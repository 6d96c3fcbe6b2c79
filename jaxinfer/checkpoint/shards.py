"""Safetensors files as they are laid out before anything is in them: which tensor goes where."""

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.checkpoint.hf_directory import INDEX, SINGLE
from jaxinfer.checkpoint.safetensors import DTYPES

ALIGNMENT = 8  # of the data in a file, as the safetensors library has it
STORED: dict[str, str] = {name: stored for stored, (name, _) in DTYPES.items()} | {
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
    "int64": "I64",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
}
"""Name of a NumPy dtype -> the format's name."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file that is being written.

    Attributes:
        name: in the file.
        shape: axes, outermost first.
        dtype: a key of `STORED`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype itself."""
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize


def split(tensors: Sequence[FileTensor], max_bytes: int) -> list[list[FileTensor]]:
    """The tensors in order, file by file: none holds more than `max_bytes`, unless it is a single tensor."""
    shards: list[list[FileTensor]] = [[]]
    held = 0
    for tensor in tensors:
        if shards[-1] and held + tensor.nbytes > max_bytes:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += tensor.nbytes
    return shards


def header(tensors: Iterable[FileTensor]) -> bytes:
    """What a file begins with; the values follow it without gaps."""
    entries: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt"}}  # transformers looks for it
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        stored = STORED[tensor.dtype]
        entries[tensor.name] = {"dtype": stored, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def shard_name(number: int, count: int) -> str:
    """Of file `number`, counted from 0, of `count`."""
    return SINGLE if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"


def write_index(folder: Path, shards: Sequence[Sequence[FileTensor]]) -> int:
    """Writes the index where there are several files; returns the bytes of all tensors."""
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    if len(shards) > 1:
        names = {
            tensor.name: shard_name(number, len(shards)) for number, shard in enumerate(shards) for tensor in shard
        }
        content: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        (folder / INDEX).write_text(json.dumps(content, indent=2), encoding="utf-8")
    return total
