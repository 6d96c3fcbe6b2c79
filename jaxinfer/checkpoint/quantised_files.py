"""Writing a quantised model's safetensors files, in any order and in several runs: every tensor has its place from the
beginning."""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np

from jaxinfer.checkpoint.save import PlannedTensor, part_rows
from jaxinfer.checkpoint.shards import FileTensor, header, shard_name, split, write_index
from jaxinfer.checkpoint.unfuse import module_array
from jaxinfer.checkpoint.weight_map import Slot
from jaxinfer.quant.array import CodedScale, QuantArray
from jaxinfer.quant.layouts.layout import Layout
from jaxinfer.quant.quantize import coded_scales, quantize
from jaxinfer.quant.storage import Storage

WEIGHT = ".weight"
NUMBER_ROOM = 32
"""Bytes more than a text that holds a number of some digits has in a trial."""


@dataclass(frozen=True)
class Module:
    """A linear layer whose weight is quantised.

    Attributes:
        name: the checkpoint's, without ".weight".
        slots: the parts of the parameter that the weight is made of.
        tensors: suffix -> what is written.
    """

    name: str
    slots: tuple[Slot, ...]
    tensors: Mapping[str, FileTensor]

    @property
    def row(self) -> int:
        """Its inputs."""
        return self.slots[0].shape[1]


class QuantisedFiles:
    """The files of one model.

    Args:
        folder: where they are.
        plan: path of a parameter -> the tensors it is split into, in the order in which they lie in the files.
        storages: path -> format of the parameters that are quantised.
        layout: how these are written.
        double: whether their scales are codes, module by module.
        dtype: name of the dtype of the others.
        max_shard_bytes: a file holds no more, unless it is a single tensor.

    Raises:
        ValueError: the layout cannot hold a parameter; names the module.
    """

    def __init__(
        self,
        folder: Path,
        plan: Mapping[str, Sequence[PlannedTensor]],
        storages: Mapping[str, Storage],
        layout: Layout,
        *,
        double: bool,
        dtype: str,
        max_shard_bytes: int,
    ) -> None:
        self._folder, self._plan, self._layout, self._double = folder, plan, layout, double
        trials = _Trials(layout, dtype, double)
        self._modules = {
            leaf: tuple(trials.module(tensor, storages[leaf]) for tensor in tensors)
            for leaf, tensors in plan.items()
            if leaf in storages
        }
        self._shards = split(list(self._file_tensors()), max_shard_bytes)
        self._places: dict[str, tuple[int, int]] = {}
        for number, shard in enumerate(self._shards):
            at = len(header(shard))
            for tensor in shard:
                self._places[tensor.name] = number, at
                at += tensor.nbytes
        self._open: dict[int, IO[bytes]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self._size(shard) for shard in self._shards)

    def create(self) -> None:
        """Makes the files with their headers and all the room they need, so that a full disk shows at once."""
        for number, shard in enumerate(self._shards):
            with (self._folder / self._name(number)).open("wb") as file:
                file.write(header(shard))
                file.flush()
                os.posix_fallocate(file.fileno(), 0, self._size(shard))

    def are_there(self) -> bool:
        """Whether an earlier run has made the files."""
        paths = [self._folder / self._name(number) for number in range(len(self._shards))]
        return all(
            path.is_file() and path.stat().st_size == self._size(shard)
            for path, shard in zip(paths, self._shards, strict=True)
        )

    def write(self, leaf: str, values: np.ndarray | QuantArray) -> None:
        """Writes a parameter.

        Args:
            leaf: its path.
            values: floats, or for those that are quantised a QuantArray of NumPy arrays.

        Raises:
            ValueError: it is not what was planned; names the tensor or module.
        """
        if isinstance(values, QuantArray):
            for module in self._modules[leaf]:
                self._write_module(module, values)
            return
        for tensor in self._plan[leaf]:
            rows = [part_rows(tensor.file.name, slot, values) for slot in tensor.slots]
            with np.errstate(over="ignore"):
                stored = np.concatenate(rows).astype(tensor.file.numpy_dtype, copy=False)
            if tensor.file.dtype == "float16" and not np.isfinite(stored).all():
                warnings.warn(f"{tensor.file.name!r} has values beyond float16's 65504; use bfloat16", stacklevel=2)
            self._put(tensor.file, stored)

    def sync(self) -> None:
        """Has what was written so far put on the disk."""
        for file in self._open.values():
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Closes the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def write_index(self) -> int:
        """Writes the index where there are several files; returns the bytes of all tensors."""
        return write_index(self._folder, self._shards)

    def _file_tensors(self) -> Iterable[FileTensor]:
        for leaf, tensors in self._plan.items():
            if leaf in self._modules:
                for module in self._modules[leaf]:
                    yield from module.tensors.values()
            else:
                yield from (tensor.file for tensor in tensors)

    def _write_module(self, module: Module, values: QuantArray) -> None:
        try:
            array = module_array(values, module.slots)
            if self._double:
                array = replace(array, scale=coded_scales(np.asarray(array.scale, np.float32)))
            packed = self._layout.of(module.name, {}).pack(array)
            if packed.keys() != module.tensors.keys():
                raise ValueError(f"comes to the tensors {sorted(packed)}, not {sorted(module.tensors)}")
        except ValueError as error:
            raise ValueError(f"{module.name} {error}") from error
        for suffix, tensor in module.tensors.items():
            self._put(tensor, _padded_text(packed[suffix], tensor))

    def _put(self, tensor: FileTensor, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values, tensor.numpy_dtype)
        if values.shape != tensor.shape:
            raise ValueError(f"tensor {tensor.name!r} is {list(values.shape)}, not {list(tensor.shape)}")
        number, at = self._places[tensor.name]
        if number not in self._open:
            self._open[number] = (self._folder / self._name(number)).open("r+b")
        self._open[number].seek(at)
        self._open[number].write(values.reshape(-1).view(np.uint8).data)

    def _name(self, number: int) -> str:
        return shard_name(number, len(self._shards))

    def _size(self, shard: Sequence[FileTensor]) -> int:
        return len(header(shard)) + sum(tensor.nbytes for tensor in shard)


class _Trials:
    """What a layout makes of modules, by having it pack zeros: some dtypes and sizes are known in no other way."""

    def __init__(self, layout: Layout, dtype: str, double: bool) -> None:
        self._layout, self._dtype, self._double = layout, dtype, double
        self._known: dict[tuple[object, ...], dict[str, tuple[tuple[int, ...], str]]] = {}

    def module(self, tensor: PlannedTensor, storage: Storage) -> Module:
        name = tensor.file.name.removesuffix(WEIGHT)
        key = tensor.file.shape, storage
        if key not in self._known:
            try:
                self._known[key] = self._pack_zeros(name, tensor.file.shape, storage)
            except ValueError as error:
                raise ValueError(f"{name} cannot be written as {self._layout}: {error}") from error
        files = {
            suffix: FileTensor(f"{name}.{suffix}", shape, dtype) for suffix, (shape, dtype) in self._known[key].items()
        }
        return Module(name, tensor.slots, files)

    def _pack_zeros(
        self, name: str, shape: tuple[int, ...], storage: Storage
    ) -> dict[str, tuple[tuple[int, ...], str]]:
        array = quantize(np.broadcast_to(np.float32(0), shape), 1, storage, self._dtype)
        if self._double:
            array = replace(array, scale=coded_scales(np.asarray(array.scale, np.float32)))
        sizes = {}
        for suffix, packed in self._layout.of(name, {}).pack(array).items():
            room = NUMBER_ROOM if _is_text(suffix, packed) and isinstance(array.scale, CodedScale) else 0
            sizes[suffix] = (packed.shape if not room else (packed.size + room,)), packed.dtype.name
        return sizes


def _is_text(suffix: str, packed: np.ndarray) -> bool:
    """Whether a tensor is JSON in bytes, as bitsandbytes has it."""
    return "quant_state" in suffix and packed.dtype == np.uint8


def _padded_text(packed: np.ndarray, tensor: FileTensor) -> np.ndarray:
    """A text with spaces up to the room that was planned for it, as JSON may end."""
    if not _is_text(tensor.name, packed) or packed.size >= tensor.shape[0]:
        return packed
    return np.pad(packed, (0, tensor.shape[0] - packed.size), constant_values=ord(" "))
