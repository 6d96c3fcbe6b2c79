"""The quantised linear layers of a checkpoint: each several tensors, found and checked by name and shape."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from jaxinfer.checkpoint.tensor import STORED_AS, Tensor
from jaxinfer.quant.layouts.layout import Layout, TensorSpec
from jaxinfer.quant.storage import Storage

if TYPE_CHECKING:
    from jaxinfer.quant.array import QuantArray

# Safetensors' names of the dtypes that codes have -> NumPy's.
CODE_DTYPES = {
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


@dataclass(frozen=True)
class PackedModule:
    """A quantised matrix ``[N, K]`` whose tensors lie in a file; stands where a `Tensor` of floats would.

    Args:
        name: of the layer, without a suffix.
        shape: N, K.
        layout: how it is packed.
        tensors: by suffix.
    """

    name: str
    shape: tuple[int, int]
    layout: Layout
    tensors: Mapping[str, Tensor]

    @property
    def dtype(self) -> str:
        """The method's name."""
        return self.layout.method

    @property
    def path(self) -> Path:
        """The file that the first of its tensors lies in."""
        return next(iter(self.tensors.values())).path

    @property
    def size(self) -> int:
        """Number of values."""
        return self.shape[0] * self.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def storage(self) -> Storage:
        """The format of what `read` gives.

        Raises:
            ValueError: its tensors do not go together; names the module.
        """
        try:
            return self.layout.storage(self.shape[1], {name: _dtype(item) for name, item in self.tensors.items()})
        except ValueError as error:
            raise ValueError(f"{self.path}: quantised module {self.name!r}: {error}") from error

    def read(self) -> "QuantArray":
        """Its matrix, of NumPy arrays.

        Raises:
            ValueError: the file changed since it was opened, or a tensor holds what is impossible; names both.
        """
        try:
            return self.layout.unpack({name: values_of(item) for name, item in self.tensors.items()}, *self.shape)
        except ValueError as error:
            raise ValueError(f"{self.path}: quantised module {self.name!r}: {error}") from error

    def rows(self, start: int, stop: int) -> np.ndarray:
        """float32 values ``[stop - start, K]`` of some outputs. All are unpacked for it. Raises as `read`."""
        from jaxinfer.quant.quantize import dequantized

        return dequantized(self.read())[start:stop]

    def ordering(self) -> np.ndarray | None:
        """What says in which order its inputs are stored; None where they are in their own."""
        return values_of(self.tensors[self.layout.ordering]) if self.storage.ordered else None


def find_packed(
    layout: Layout, expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], source: Path
) -> dict[str, PackedModule]:
    """The matrices that are quantised in a checkpoint.

    Args:
        layout: the checkpoint's.
        expected: name of a matrix in floats, "[module].weight" -> its shape.
        tensors: all of the checkpoint's, by name.
        source: its path, for messages.

    Returns:
        Name of a matrix in floats -> the module that is there instead.

    Raises:
        ValueError: a tensor is missing or of the wrong shape or dtype, or a matrix does not fit the layout; names it.
    """
    names = {name.removesuffix(".weight"): name for name in expected}
    found = {
        module: parts
        for module, parts in _by_module(tensors, names.keys()).items()
        if _is_packed(parts) and (not _is_float(parts) or layout.covers(module))
    }
    packed, missing, wrong = {}, [], []
    for module, parts in found.items():
        channels, row = expected[names[module]]
        try:
            own = layout.of(module, {suffix: TensorSpec(part.shape, _dtype(part)) for suffix, part in parts.items()})
            specs = own.shapes(channels, row)
        except ValueError as error:
            raise ValueError(f"{source}: quantised module {module!r}: {error}") from error
        missing += [f"{module}.{s} {list(x.shape)}" for s, x in specs.items() if x.required and s not in parts]
        wrong += [
            f"{module}.{suffix} is {_dtype(parts[suffix])}{list(parts[suffix].shape)} but {layout} of "
            f"{channels} x {row} says {_words(spec)}"
            for suffix, spec in specs.items()
            if suffix in parts and not _fits(parts[suffix], spec)
        ]
        known = {suffix: part for suffix, part in parts.items() if suffix in specs}
        packed[names[module]] = PackedModule(module, (channels, row), own, known)
    if not packed:
        raise ValueError(
            f"{source}: quantization_config says {layout}, but no matrix is stored in that way; if all are floats, "
            "take quantization_config out of the config, or the file away that says so beside it"
        )
    if missing or wrong:
        problem = f"{listed(missing)} missing from the checkpoint" if missing else f"tensor {listed(wrong)}"
        raise ValueError(f"{source}: {problem}; its quantization_config says {layout}")
    return packed


def idle_biases(modules: Iterable[PackedModule], tensors: Mapping[str, Tensor]) -> set[str]:
    """Names of the modules' biases that are all 0: AutoGPTQ wrote one for every layer until 2024, also where the model
    has none. They are read for it."""
    places = {f"{module.name}.bias": module.shape[0] for module in modules}
    return {
        name
        for name, channels in places.items()
        if name in tensors and tensors[name].shape == (channels,) and not values_of(tensors[name]).any()
    }


def values_of(tensor: Tensor) -> np.ndarray:
    """A tensor's values, codes too, read-only and mapped."""
    dtype = CODE_DTYPES.get(tensor.dtype)
    if dtype is None:
        dtype = np.dtype(tensor.storage)
    if not tensor.size:
        return np.empty(tensor.shape, dtype)
    return tensor.stored_rows(0, tensor.shape[0] if tensor.shape else 1).view(dtype).reshape(tensor.shape)


def _by_module(tensors: Mapping[str, Tensor], modules: Collection[str]) -> dict[str, dict[str, Tensor]]:
    """Module -> its tensors by suffix, without its bias, which is stored as it is."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        end = name.find(".")
        while end > 0:
            if name[:end] in modules and name[end + 1 :] != "bias":
                found.setdefault(name[:end], {})[name[end + 1 :]] = tensor
                break
            end = name.find(".", end + 1)
    return found


def _is_packed(parts: Mapping[str, Tensor]) -> bool:
    """Whether there is anything but a float weight."""
    return set(parts) != {"weight"} or not _is_float(parts)


def _is_float(parts: Mapping[str, Tensor]) -> bool:
    """Whether there is a float weight, which bitsandbytes' codes can pass for."""
    return "weight" in parts and parts["weight"].dtype in STORED_AS


def _dtype(tensor: Tensor) -> str:
    known = CODE_DTYPES.get(tensor.dtype)
    return tensor.dtype if known is None else known.name


def _fits(tensor: Tensor, spec: TensorSpec) -> bool:
    dtypes = (spec.dtype,) if isinstance(spec.dtype, str) else spec.dtype
    return tensor.shape == spec.shape and _dtype(tensor) in dtypes


def _words(spec: TensorSpec) -> str:
    dtypes = spec.dtype if isinstance(spec.dtype, str) else " or ".join(spec.dtype)
    return f"{dtypes}{list(spec.shape)}"


def listed(items: list[str], most: int = 3) -> str:
    """The first of them, and how many more there are."""
    more = f" (and {len(items) - most} more)" if len(items) > most else ""
    return ", ".join(items[:most]) + more
