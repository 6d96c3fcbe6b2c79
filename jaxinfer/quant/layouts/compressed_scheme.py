"""One config group of a compressed-tensors checkpoint: how the weights of its modules are kept.

``weight = (code - zero) * scale`` with a scale for a matrix, an output, a group of inputs or a block. "pack-quantized"
has ``weight_packed``, int32 words of codes plus half their range, the first in the lowest bits, and zero points
likewise, packed along the outputs; the others have plain int8 or float8 ``weight``.
https://github.com/vllm-project/compressed-tensors
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np

from jaxinfer.quant.array import CodedScale, QuantArray
from jaxinfer.quant.layouts.blocks import group_in_blocks, over_rectangles, rectangles_of
from jaxinfer.quant.layouts.fp8_block import FP8, checked_codes
from jaxinfer.quant.layouts.layout import FLOATS, TensorSpec
from jaxinfer.quant.layouts.words import codes_of, inputs_in_order, transposed, words_of
from jaxinfer.quant.layouts.zero_points import offsets_of, zero_points
from jaxinfer.quant.quantize import host_scales
from jaxinfer.quant.storage import FloatType, Storage

PACKED = "pack-quantized"
ORDERING = "weight_g_idx"
"""Suffix of what says each input's group."""
Strategy = Literal["tensor", "channel", "group", "block"]
_UNUSED = tuple(f"{side}_{part}" for side in ("input", "output") for part in ("scale", "zero_point"))
"""Suffixes of static ranges of activations."""


@dataclass(frozen=True)
class Scheme:
    """Weights of one kind.

    Attributes:
        kind: "int" or "float" (e4m3).
        bits: of a code, 8 or 4 of an integer.
        packed: whether the format is "pack-quantized".
        strategy: what shares a scale.
        block: outputs and inputs that do, for "group" and "block".
        symmetric: no zero points.
        act_bits: of activations as they are multiplied here, see `QuantArray`.
    """

    kind: Literal["int", "float"]
    bits: Literal[4, 8]
    packed: bool
    strategy: Strategy
    block: tuple[int, int] = (1, 1)
    symmetric: bool = True
    act_bits: int = 16

    @classmethod
    def of_storage(cls, storage: Storage) -> "Scheme":
        """What holds a format: packed integers, but plain ones with rounded activations.

        Raises:
            ValueError: a format that compressed-tensors does not have.
        """
        if storage.kind not in ("int4", "int8", "fp8") or storage.double or storage.ordered:
            raise ValueError(f"compressed-tensors has no {storage}; it has int4, int8 and fp8")
        strategy: Strategy = "group" if storage.group else "channel"
        return cls(
            kind="float" if storage.kind == "fp8" else "int",
            bits=4 if storage.kind == "int4" else 8,
            packed=storage.kind != "fp8" and storage.act_bits == 16,
            strategy=strategy,
            block=(1, storage.group or 1),
            symmetric=storage.symmetric and (storage.kind == "int4" or storage.offset_dtype is None),
            act_bits=storage.act_bits,
        )

    @property
    def format(self) -> str:
        """Its name."""
        return PACKED if self.packed else f"{self.kind}-quantized"

    def shapes(self, channels: int, row: int, found: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """See `Layout`; `found` is what the checkpoint has of the module."""
        height, width = self._rectangle(channels, row)
        if self.strategy == "group" and row % width:
            raise ValueError(f"weights of {row} inputs do not come to groups of group_size={width}")
        if self._nibbles and row % 2:
            raise ValueError(f"weights of {row} inputs do not come to bytes of two 4-bit codes")
        grid = (-(-channels // height), -(-row // width))
        grid_shape = (1,) if self.strategy == "tensor" else grid
        plain = "int8" if self.kind == "int" else "float8_e4m3fn"
        specs = {"weight_scale": TensorSpec(_as_found("weight_scale", grid_shape, found), FLOATS)}
        zero = TensorSpec(_as_found("weight_zero_point", grid_shape, found), (plain, *FLOATS))
        if self.packed:
            specs["weight_packed"] = TensorSpec((channels, _words(row, self.bits)), "int32")
            specs["weight_shape"] = TensorSpec((2,), ("int64", "int32"), required=False)
            zero = TensorSpec((_words(channels, self.bits), grid[1]), "int32")
        else:
            specs["weight"] = TensorSpec((channels, row), plain)
        if not self.symmetric or "weight_zero_point" in found:
            specs["weight_zero_point"] = zero._replace(required=not self.symmetric)
        if self.strategy == "group":
            specs[ORDERING] = TensorSpec((row,), ("int32", "int64"), required=False)
        return specs | {name: found[name]._replace(required=False) for name in _UNUSED if name in found}

    def storage(self, row: int, dtypes: Mapping[str, str]) -> Storage:
        """See `Layout`."""
        group = self._group(row)
        plain = Storage(
            "fp8" if self.kind == "float" else "int4" if self._nibbles else "int8",
            0 if group == row else group,
            symmetric=self.symmetric,
            act_bits=self.act_bits,
            ordered=ORDERING in dtypes,
        )
        scales: FloatType = "float32"
        if group != row and self.strategy == "group":
            scales = cast(FloatType, dtypes.get("weight_scale", "float32"))
        offsets: FloatType | None = scales if self._nibbles else None
        if not self.symmetric:
            offsets = "float32"
        # What is the kind's own is not said, so that formats which are the same are equal.
        if scales != plain.scale_dtype:
            plain = replace(plain, scales=scales)
        return plain if offsets == plain.offset_dtype else replace(plain, offsets=offsets)

    def unpack(self, tensors: Mapping[str, np.ndarray], channels: int, row: int) -> QuantArray:
        """See `Layout`."""
        said = tensors.get("weight_shape")
        if said is not None and said.tolist() != [channels, row]:
            raise ValueError(f"weight_shape is {said.tolist()} where the model has [{channels}, {row}]")
        storage = self.storage(row, {name: str(tensor.dtype) for name, tensor in tensors.items()})
        scale = self._over_groups(tensors["weight_scale"], channels, row).astype(storage.scale_dtype, copy=False)
        if not np.isfinite(scale).all():
            raise ValueError("weight_scale holds NaN or infinity; repair the checkpoint")
        codes = self._codes(tensors, row)
        order = None
        if storage.ordered:
            order = _order_of(tensors[ORDERING], storage.group_of(row))
            codes = inputs_in_order(codes, order, storage.bits)
        return QuantArray(
            codes=codes,
            scale=scale,
            offset=self._offsets(tensors, scale, storage, channels, row),
            codebook=None,
            bits=storage.bits,
            group=storage.group_of(row),
            axis=1,
            shape=(channels, row),
            act_bits=self.act_bits,
            order=order,
        )

    def pack(self, array: QuantArray) -> dict[str, np.ndarray]:
        """See `Layout`."""
        channels, row = array.channels, array.row
        expected, codes = self.storage(row, {}), np.asarray(array.codes)
        plain = {"int8": np.int8, "fp8": FP8, "int4": np.uint8}[expected.kind]
        if codes.dtype != plain or array.codebook is not None or array.order is not None:
            raise ValueError(f"compressed-tensors' {self} holds {expected.kind} codes, inputs in their own order")
        scale = host_scales(array) if isinstance(array.scale, CodedScale) else np.asarray(array.scale)
        scale = rectangles_of(scale.reshape(channels, -1), self._rectangle(channels, row), channels, row)
        codes = codes.reshape(channels, -1)
        tensors = {"weight_scale": scale.reshape(-1) if self.strategy == "tensor" else scale}
        if not self.packed:
            tensors["weight"] = codes
        else:
            packed = codes if self._nibbles else codes.view(np.uint8) ^ 0x80
            tensors["weight_packed"] = _padded(packed, 4).view("<i4").astype(np.int32, copy=False)
            tensors["weight_shape"] = np.array([channels, row], np.int64)
        return tensors | self._packed_zeros(array, channels, row)

    def __str__(self) -> str:
        by = {"tensor": "a scale a matrix", "channel": "per output channel", "group": f"in groups of {self.block[1]}"}
        return (
            f"{'fp8' if self.kind == 'float' else f'int{self.bits}'} "
            + by.get(self.strategy, "in blocks of {} by {}".format(*self.block))
            + ("" if self.symmetric else ", asymmetric")
        )

    @property
    def _nibbles(self) -> bool:
        return self.packed and self.bits == 4

    def _rectangle(self, channels: int, row: int) -> tuple[int, int]:
        """Outputs and inputs that share a scale."""
        whole = {"tensor": (channels, row), "channel": (1, row)}
        return whole.get(self.strategy, self.block)

    def _group(self, row: int) -> int:
        return group_in_blocks(self._rectangle(1, row)[1], row, runs_on=False)

    def _over_groups(self, values: np.ndarray, channels: int, row: int) -> np.ndarray:
        """Something that there is once a scale, ``[N, K / group]``."""
        height, width = self._rectangle(channels, row)
        return over_rectangles(values.reshape(-(-channels // height), -1), (height, width), channels, row)

    def _codes(self, tensors: Mapping[str, np.ndarray], row: int) -> np.ndarray:
        """As QuantArray has them."""
        if not self.packed:
            return checked_codes(tensors["weight"]) if self.kind == "float" else tensors["weight"]
        stored = np.ascontiguousarray(tensors["weight_packed"], "<i4").view(np.uint8)[:, : row * self.bits // 8]
        return np.ascontiguousarray(stored) if self._nibbles else (stored ^ 0x80).view(np.int8)

    def _offsets(
        self, tensors: Mapping[str, np.ndarray], scale: np.ndarray, storage: Storage, channels: int, row: int
    ) -> np.ndarray | None:
        zero = tensors.get("weight_zero_point")
        if zero is not None and self.packed:
            unsigned = codes_of(transposed(zero), self.bits)[:, :channels]
            zero = transposed(unsigned).astype(np.float32) - 2 ** (self.bits - 1)
        if self.symmetric:
            if zero is not None and zero.astype(np.float32).any():
                raise ValueError("weight_zero_point is not 0 although the config says symmetric=true")
            return (
                offsets_of(np.full_like(scale, 8), scale, "weight_scale", scale.dtype.name) if self._nibbles else None
            )
        assert zero is not None
        middle = np.float32(8 if self._nibbles else 0)
        return offsets_of(self._over_groups(zero, channels, row).astype(np.float32) + middle, scale, "weight_scale")

    def _packed_zeros(self, array: QuantArray, channels: int, row: int) -> dict[str, np.ndarray]:
        middle, half = (0, 8) if self._nibbles else (128, 128)
        zero = zero_points(array, host_scales(array).reshape(channels, -1), middle, 2 * half - 1)
        if self.symmetric:
            if not ((zero == half) | (host_scales(array).reshape(zero.shape) == 0)).all():
                raise ValueError(f"compressed-tensors' {self} has no zero points but half the range of a code")
            return {}
        zero = rectangles_of(zero, self._rectangle(channels, row), channels, row)
        if not self.packed:
            plain = (zero ^ 0x80).view(np.int8)
            return {"weight_zero_point": plain.reshape(-1) if self.strategy == "tensor" else plain}
        along = _padded(transposed(zero), 32 // self.bits)
        return {"weight_zero_point": transposed(words_of(along, self.bits))}


def _as_found(suffix: str, shape: tuple[int, ...], found: Mapping[str, TensorSpec]) -> tuple[int, ...]:
    """The checkpoint's shape, where it differs in axes of size 1 alone."""
    there = found[suffix].shape if suffix in found else shape
    return there if [n for n in there if n != 1] == [n for n in shape if n != 1] else shape


def _words(codes: int, bits: int) -> int:
    return -(-codes * bits // 32)


def _padded(values: np.ndarray, multiple: int) -> np.ndarray:
    """With zeros at the end of each row."""
    short = -values.shape[1] % multiple
    return np.ascontiguousarray(np.pad(values, ((0, 0), (0, short))) if short else values)


def _order_of(groups: np.ndarray, size: int) -> np.ndarray:
    """The inputs by their group, int32; -1 everywhere stands for their own order."""
    if (groups == -1).all():
        return np.arange(groups.size, dtype=np.int32)
    count = groups.size // size
    if groups.min() < 0 or groups.max() >= count or not (np.bincount(groups, minlength=count) == size).all():
        raise ValueError(f"{ORDERING} does not give each of {count} groups {size} inputs; repair the checkpoint")
    return np.argsort(groups, kind="stable").astype(np.int32)
