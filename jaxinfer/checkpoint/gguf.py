"""GGUF files: metadata and tensor table are read and checked, tensors stay in the file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Types and
dequantisation are the `gguf` package's; the header is parsed here, since the package's reader takes seconds for a
vocabulary.
"""

import math
import struct
from dataclasses import dataclass
from functools import partial
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxinfer.checkpoint.tensor import Tensor

# Value type number -> numpy type; 8 is a string, 9 an array.
INTEGERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 10: "<u8", 11: "<i8"}
SCALARS = {**INTEGERS, 6: "<f4", 7: "?", 12: "<f8"}
STRING, ARRAY = 8, 9
PLAIN: dict[GGMLQuantizationType, tuple[str, Any]] = {
    GGMLQuantizationType.F64: ("float64", np.float64),
    GGMLQuantizationType.F32: ("float32", np.float32),
    GGMLQuantizationType.F16: ("float16", np.float16),
    GGMLQuantizationType.BF16: ("bfloat16", ml_dtypes.bfloat16),
}
# Name, shape (outermost axis first; the file has it the other way round), type number, offset in the data.
_Entry = tuple[str, tuple[int, ...], int, int]
NOT_WEIGHTS = ("I8", "I16", "I32", "I64")


@dataclass(frozen=True)
class GGUFFile:
    """A file's metadata (key -> Python value) and its tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def read_gguf(path: Path) -> GGUFFile:
    """Reads a file's header. No tensor data is read.

    Raises:
        ValueError: wrong magic, unsupported version, truncated or corrupt; names the file and, if it can, the tensor.
    """
    if path.stat().st_size < 24:
        raise ValueError(f"{path} is not a GGUF file: it has only {path.stat().st_size} bytes")
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        cursor = _Cursor(path, data)
        tensor_count, pair_count = _read_preamble(cursor)
        metadata = {}
        for _ in range(pair_count):
            key = cursor.string()
            if not key or key in metadata:
                raise ValueError(f"{path} is corrupt: metadata key {key!r} is empty or repeated")
            metadata[key] = cursor.value(cursor.scalar("<u4"))
        if metadata.get("split.count", 0) > 1:
            raise ValueError(f"{path} is one of {metadata['split.count']} parts; merge them with llama-gguf-split")
        entries = _read_entries(cursor, tensor_count)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"{path} is corrupt: general.alignment={alignment!r}")
        data_start = -(-cursor.position // alignment) * alignment
        tensors = {entry[0]: _tensor(path, entry, data_start, len(data)) for entry in entries}
    return GGUFFile(metadata, tensors)


class _Cursor:
    """Reads values one after the other; every read is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def take(self, count: int) -> int:
        """Moves `count` bytes on and returns where they start."""
        start = self.position
        if count > len(self.data) - start:
            raise ValueError(
                f"{self.path} is truncated or corrupt: {count} bytes wanted at {start} of {len(self.data)}"
            )
        self.position = start + count
        return start

    def scalar(self, dtype: str) -> Any:
        start = self.take(np.dtype(dtype).itemsize)
        return np.frombuffer(self.data[start : self.position], dtype)[0].item()

    def string(self) -> str:
        length = struct.unpack_from("<Q", self.data, self.take(8))[0]
        start = self.take(length)
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def value(self, kind: int, nested: bool = False) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY and not nested:
            item, count = self.scalar("<u4"), self.scalar("<u8")
            if item in SCALARS:
                start = self.take(count * np.dtype(SCALARS[item]).itemsize)
                return np.frombuffer(self.data[start : self.position], SCALARS[item]).tolist()
            if count * 8 > len(self.data) - self.position:
                raise ValueError(f"{self.path} is truncated or corrupt: an array of {count} strings at {self.position}")
            return [self.value(item, nested=True) for _ in range(count)]
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        raise ValueError(f"{self.path} is corrupt: unknown metadata type {kind} before byte {self.position}")


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    magic = cursor.data[cursor.take(4) : 4]
    if magic != b"GGUF":
        raise ValueError(f"{cursor.path} is not a GGUF file: it starts with {magic!r}, not b'GGUF'")
    version, tensor_count, pair_count = cursor.scalar("<u4"), cursor.scalar("<u8"), cursor.scalar("<u8")
    if version not in (2, 3):
        hint = "it is big-endian" if version in (2 << 24, 3 << 24) else "convert it again with a current tool"
        raise ValueError(f"{cursor.path}: GGUF version {version} is not supported, only 2 and 3; {hint}")
    return tensor_count, pair_count


def _read_entries(cursor: _Cursor, count: int) -> list[_Entry]:
    entries: dict[str, _Entry] = {}
    for _ in range(count):
        name, rank = cursor.string(), cursor.scalar("<u4")
        if not name or name in entries or rank > 4:
            raise ValueError(f"{cursor.path} is corrupt: tensor {name!r} is nameless, repeated, or has {rank} > 4 axes")
        shape = tuple(cursor.scalar("<u8") for _ in range(rank))[::-1]
        entries[name] = (name, shape, cursor.scalar("<u4"), cursor.scalar("<u8"))
    return list(entries.values())


def _tensor(path: Path, entry: _Entry, data_start: int, file_bytes: int) -> Tensor:
    name, shape, number, offset = entry
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise ValueError(f"{path}: tensor {name!r} has unknown type number {number}") from error
    if kind.name in NOT_WEIGHTS:
        raise ValueError(f"{path}: tensor {name!r} is {kind.name}; integer tensors are not weights")
    block, block_bytes = GGML_QUANT_SIZES[kind]
    width = shape[-1] if shape else 1
    if width % block:
        raise ValueError(f"{path} is corrupt: rows of {kind.name} tensor {name!r} have {width} values, not n * {block}")
    dtype, storage = PLAIN.get(kind, (kind.name.lower(), np.uint8))
    row_bytes = math.prod(shape[1:]) // block * block_bytes if len(shape) > 1 else block_bytes
    decode = None if kind in PLAIN else partial(_decode, kind=kind)
    if decode is not None and len(shape) < 2:
        raise ValueError(f"{path}: tensor {name!r} is a vector of type {kind.name}; vectors must be F32, F16 or BF16")
    tensor = Tensor(name, shape, dtype, path, data_start + offset, row_bytes, storage, decode)
    if tensor.offset + tensor.nbytes > file_bytes:
        raise ValueError(
            f"{path} is truncated or corrupt: tensor {name!r} ends at byte {tensor.offset + tensor.nbytes}, "
            f"the file at {file_bytes}"
        )
    return tensor


def _decode(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    return dequantize(np.asarray(rows), kind)
