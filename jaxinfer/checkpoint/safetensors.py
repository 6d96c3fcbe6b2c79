"""Safetensors files: the header is read and checked, tensors stay in the file.

Format: 8 bytes little-endian header length, a JSON header ``{name: {dtype, shape, data_offsets}}``, then the data
(https://huggingface.co/docs/safetensors). The header is parsed here because the library's numpy loader copies whole
tensors.
"""

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.checkpoint.tensor import Tensor

DTYPES: dict[str, tuple[str, Any]] = {
    "F64": ("float64", np.float64),
    "F32": ("float32", np.float32),
    "F16": ("float16", np.float16),
    "BF16": ("bfloat16", ml_dtypes.bfloat16),
}
# Masks and the like, which lie beside the weights of some families and are never read: name -> bytes of a value.
OTHERS = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8}
OTHERS |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Reads a file's header.

    Returns:
        Its tensors by name. No tensor data has been read.

    Raises:
        ValueError: the file is truncated or corrupt, naming the file and, where it can, the tensor: as the format has
            it, the tensors fill the data from end to end, without gaps and without sharing a byte.
    """
    header, data_start = _read_header(path)
    data_bytes = path.stat().st_size - data_start
    tensors = {name: _tensor(path, name, entry, data_start) for name, entry in header.items() if name != "__metadata__"}
    end = max((tensor.offset + tensor.nbytes - data_start for tensor in tensors.values()), default=0)
    if end > data_bytes:
        last = max(tensors.values(), key=lambda tensor: tensor.offset + tensor.nbytes)
        raise ValueError(
            f"{path} is truncated: tensor {last.name!r} ends at byte {data_start + end}, the file at "
            f"{data_start + data_bytes}; download it again"
        )
    _check_layout(path, tensors.values(), data_start)
    return tensors


def refuse_others(tensors: Iterable[Tensor]) -> None:
    """Raises ValueError for a tensor whose values are of no type that weights are read from; names it."""
    for tensor in tensors:
        if tensor.dtype in OTHERS:
            raise ValueError(
                f"{tensor.path}: tensor {tensor.name!r} has dtype {tensor.dtype}, not one of the supported "
                f"{', '.join(DTYPES)}"
            )


def _check_layout(path: Path, tensors: Iterable[Tensor], data_start: int) -> None:
    end, before = data_start, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != end:
            raise ValueError(
                f"{path} is corrupt: tensor {tensor.name!r} begins at byte {tensor.offset}, but {before} ends at byte "
                f"{end}"
            )
        end, before = tensor.offset + tensor.nbytes, f"tensor {tensor.name!r} before it"
    size = path.stat().st_size
    if end != size:
        raise ValueError(f"{path} is corrupt: its tensors end at byte {end}, the file at {size}; download it again")


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"{path} is not a safetensors file or is truncated: {size} bytes, header length {length}")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is corrupt: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path} is corrupt: its header is not a mapping of tensor names")
    return header, 8 + length


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> Tensor:
    try:
        stored, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not (
            isinstance(stored, str) and isinstance(shape, list) and all(type(n) is int for n in (*shape, start, end))
        ):
            raise TypeError("a dtype is a text, shape and offsets are whole numbers")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is corrupt: the header entry of tensor {name!r} is {entry!r}") from error
    shape = tuple(shape)
    if stored not in DTYPES and stored not in OTHERS:
        raise ValueError(f"{path}: tensor {name!r} has the unknown dtype {stored}")
    dtype, storage = DTYPES.get(stored) or (stored, f"V{OTHERS[stored]}")
    row_bytes = math.prod(shape[1:]) * np.dtype(storage).itemsize
    tensor = Tensor(name, shape, dtype, path, data_start + start, row_bytes, storage)
    if start < 0 or min(shape, default=0) < 0 or end - start != tensor.nbytes:
        raise ValueError(
            f"{path} is corrupt: tensor {name!r} of shape {shape} and dtype {stored} takes {tensor.nbytes} bytes, but "
            f"its offsets are {start} to {end}"
        )
    return tensor
