"""A tensor that lies in a file and is read a few rows at a time."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike

STORED_AS = {"float64": "float32", "float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}


@dataclass(frozen=True)
class Tensor:
    """Where one tensor of a checkpoint lies, and how its bytes become numbers.

    Every read maps just the rows it wants and unmaps them when the array is dropped, so that pages of the file never
    pile up in the process.

    Args:
        name: the checkpoint's name of it.
        shape: axes, outermost first.
        dtype: stored type, e.g. "float32", "bfloat16", "q4_1".
        path: file it lies in.
        offset: its first byte in that file.
        row_bytes: bytes of one entry of the first axis.
        storage: numpy type of the mapped bytes.
        decode: turns mapped rows (uint8 `[rows, row_bytes]`) into float32; None when the storage type is the value.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: Path
    offset: int
    row_bytes: int
    storage: DTypeLike
    decode: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.row_bytes * (self.shape[0] if self.shape else 1)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Reads entries `start` to `stop` of the first axis.

        Returns:
            Array `[stop - start, *shape[1:]]`; read-only and mapped, or float32 if the tensor is quantised.

        Raises:
            ValueError: the file is no longer what it was when the tensor was found.
        """
        count = stop - start
        if not count or not self.row_bytes:
            return np.empty((count, *self.shape[1:]), np.float32)
        mapped = self.stored_rows(start, stop)
        if self.decode is not None:
            return self.decode(mapped).reshape(count, *self.shape[1:])
        return mapped.view(self.storage).reshape(count, *self.shape[1:])

    def stored_rows(self, start: int, stop: int) -> np.ndarray:
        """The bytes of entries `start` to `stop` of the first axis, which are some: uint8 `[stop - start, row_bytes]`,
        read-only and mapped. Raises as `rows`."""
        count = stop - start
        try:
            mapped = np.memmap(self.path, np.uint8, "r", self.offset + start * self.row_bytes, (count, self.row_bytes))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path} changed while it was read, at tensor {self.name!r}: {error}") from error
        return np.asarray(mapped)


class Values(Protocol):
    """What is asked of a tensor's type."""

    @property
    def dtype(self) -> str: ...

    @property
    def size(self) -> int: ...


def stored_dtype(tensors: Iterable[Values]) -> str:
    """The 16- or 32-bit type that suits most of the values: their own; bfloat16, with its range, for quantised ones."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        dtype = STORED_AS.get(tensor.dtype, "bfloat16")
        sizes[dtype] = sizes.get(dtype, 0) + tensor.size
    return max(sizes, key=sizes.__getitem__, default="float32")
