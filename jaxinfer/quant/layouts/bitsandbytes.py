"""bitsandbytes' layouts: int8 with a scale an output (arXiv:2208.07339), and the 4-bit tables NF4 and FP4
(arXiv:2305.14314).

Of 8 bits: ``weight`` int8 ``[N, K]`` and ``SCB``, the largest magnitude of each output: ``weight * SCB / 127``. Of
4 bits: ``weight`` bytes ``[N * K / 2, 1]``, two codes each, the first in the high nibble; ``weight.absmax`` for blocks
that run through the whole matrix in C order; the table ``weight.quant_map``; and JSON as bytes with the sizes. With
double quantisation absmax are codes of ``weight.nested_quant_map`` with scales ``weight.nested_absmax`` of their own,
and the JSON has their offset.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from jaxinfer.quant.array import CodedScale, QuantArray
from jaxinfer.quant.codebook import FP4, NF4
from jaxinfer.quant.layouts.blocks import group_in_blocks, over_runs
from jaxinfer.quant.layouts.layout import TensorSpec, keep
from jaxinfer.quant.layouts.skipped_modules import checked_patterns, is_skipped
from jaxinfer.quant.storage import SCALES_PER_BLOCK, Storage

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Sizes of 4-bit blocks that bitsandbytes knows."""
_TABLES: Mapping[str, np.ndarray] = {"nf4": NF4, "fp4": FP4}
_STATE = "weight.quant_state.bitsandbytes__"
_ROW_FORMAT = 0  # bitsandbytes' number for a weight whose bytes are in the order of its axes
_INVERSE_127 = np.float32(1 / 127)
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "llm_int8_has_fp16_weight": (False,),
    "bnb_4bit_quant_type": ("nf4", "fp4"),
    "bnb_4bit_use_double_quant": (True, False, None),
    "load_in_8bit": (True, False, None),
    "load_in_4bit": (True, False, None),
}


@dataclass(frozen=True)
class BitsAndBytesLayout:
    """One of the layouts for all modules; block sizes and whether scales are quantised are a module's own.

    Attributes:
        kind: "int8", "nf4" or "fp4".
        double: whether scales of 4 bits are quantised.
        skipped: patterns of modules that are in floats, as for `is_skipped`.
        block: values of a 4-bit block.
        found: what the checkpoint has of the module that this is the layout of.
    """

    kind: Literal["int8", "nf4", "fp4"]
    double: bool = False
    skipped: tuple[str, ...] | None = None
    block: int = field(default=64, compare=False)
    found: Mapping[str, TensorSpec] = field(default_factory=dict, compare=False, repr=False)
    method: str = field(default="bitsandbytes", init=False)
    ordering: str = field(default="", init=False)
    unread: tuple[str, ...] = field(default=(), init=False)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "BitsAndBytesLayout":
        """See `Layout`."""
        keep(config, _ALLOWED, "bitsandbytes")
        eight, four = (bool(config.get(f"load_in_{bits}bit") or config.get(f"_load_in_{bits}bit")) for bits in (8, 4))
        if eight == four:
            raise ValueError(
                f"quantization_config of bitsandbytes has load_in_8bit={eight} and load_in_4bit={four}: one is true"
            )
        return cls(
            kind="int8" if eight else config.get("bnb_4bit_quant_type", "fp4"),
            double=four and bool(config.get("bnb_4bit_use_double_quant")),
            skipped=checked_patterns("llm_int8_skip_modules", config.get("llm_int8_skip_modules")),
        )

    def config(self) -> dict[str, Any]:
        """See `Layout`."""
        eight = self.kind == "int8"
        said: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_8bit": eight, "load_in_4bit": not eight}
        said["llm_int8_skip_modules"] = None if self.skipped is None else list(self.skipped)
        if not eight:
            said |= {"bnb_4bit_quant_type": self.kind, "bnb_4bit_use_double_quant": self.double}
            said |= {"bnb_4bit_quant_storage": "uint8"}
        return said

    @property
    def names(self) -> tuple[str, ...]:
        """See `Layout`. `load_in_4bit` without a type is "fp4", as in transformers, where a checkpoint's own type is
        taken then."""
        return ("bitsandbytes", self.kind) if self.kind != "nf4" else ("bitsandbytes", "nf4", "fp4")

    def __str__(self) -> str:
        return f"bitsandbytes {self.kind}" + (", quantised scales" if self.double else "")

    def covers(self, module: str) -> bool:
        """See `Layout`."""
        return not is_skipped(module, self.skipped)

    def of(self, module: str, tensors: Mapping[str, TensorSpec]) -> "BitsAndBytesLayout":
        """See `Layout`: the block size is what the number of scales says, the table what the name of the state says."""
        if self.kind == "int8":
            return replace(self, found=dict(tensors))
        kinds: tuple[Literal["nf4", "fp4"], ...] = ("nf4", "fp4")
        kind = next((kind for kind in kinds if _STATE + kind in tensors), self.kind)
        block, scales = self.block, tensors.get("weight.absmax")
        if scales is not None and "weight" in tensors:
            count, values = int(np.prod(scales.shape)), 2 * _bytes(tensors["weight"])
            block = next((size for size in BLOCKS if -(-values // size) == count), 0)
            if not block:
                raise ValueError(
                    f"weight.absmax has {count} scales for {values} values, which fits no block of {_listed(BLOCKS)}"
                )
        double = "weight.nested_absmax" in tensors if tensors else self.double
        return replace(self, kind=kind, double=double, block=block, found=dict(tensors))

    def shapes(self, channels: int, row: int) -> Mapping[str, TensorSpec]:
        """See `Layout`."""
        if self.kind == "int8":
            return {
                "weight": TensorSpec((channels, row), "int8"),
                "SCB": TensorSpec((channels,), "float32"),
                "weight_format": TensorSpec(self._found_shape("weight_format", ()), "uint8", required=False),
            }
        if row % 2:
            raise ValueError(f"channels of {row} inputs cannot be told apart in bytes of two 4-bit codes")
        scales = -(-channels * row // self.block)
        state = _STATE + self.kind
        weight = self.found.get("weight", TensorSpec((channels * row // 2, 1), "uint8"))
        if _bytes(weight) != channels * row // 2:
            weight = TensorSpec((channels * row // 2, 1), "uint8")
        specs = {
            "weight": weight,
            "weight.absmax": TensorSpec((scales,), "uint8" if self.double else "float32"),
            "weight.quant_map": TensorSpec((16,), "float32"),
            state: TensorSpec(self._found_shape(state, (1,)), "uint8"),
        }
        if self.double:
            specs["weight.nested_absmax"] = TensorSpec(self._found_shape("weight.nested_absmax", (1,)), "float32")
            specs["weight.nested_quant_map"] = TensorSpec((256,), "float32")
        return specs

    def storage(self, row: int, dtypes: Mapping[str, str]) -> Storage:
        """See `Layout`."""
        if self.kind == "int8":
            return Storage("int8")
        group = group_in_blocks(self.block, row, runs_on=True)
        return Storage(self.kind, group, double=self.double and self._keeps_coded(group))

    def unpack(self, tensors: Mapping[str, np.ndarray], channels: int, row: int) -> QuantArray:
        """See `Layout`."""
        if self.kind == "int8":
            return _unpack_int8(tensors, channels, row)
        suffix = _STATE + self.kind
        state = _read_state(suffix, tensors[suffix], self.double)
        scales = -(-channels * row // state["blocksize"])
        if state["shape"] != [channels, row] or scales != tensors["weight.absmax"].size:
            raise ValueError(
                f"{suffix} has shape {state['shape']} and blocks of {state['blocksize']} where weight.absmax is "
                f"{list(tensors['weight.absmax'].shape)} and the model has [{channels}, {row}]"
            )
        packed = np.ascontiguousarray(tensors["weight"]).view(np.uint8).reshape(channels, row // 2)
        storage = self.storage(row, {})
        return QuantArray(
            codes=_swap_nibbles(packed),
            scale=self._scales(tensors, state, channels, row, storage),
            offset=None,
            codebook=_finite(tensors, "weight.quant_map"),
            bits=4,
            group=storage.group_of(row),
            axis=1,
            shape=(channels, row),
        )

    def pack(self, array: QuantArray) -> dict[str, np.ndarray]:
        """See `Layout`; ``SCB`` is the scale times 127, rounded."""
        if array.offset is not None or array.order is not None:
            raise ValueError("bitsandbytes' layouts have neither offsets nor an order of inputs")
        if self.kind == "int8":
            return _pack_int8(array)
        table = _TABLES[self.kind]
        if array.codebook is None or not np.array_equal(np.asarray(array.codebook), table):
            raise ValueError(f"bitsandbytes' {self.kind} holds 4-bit codes of its own table only")
        coded = isinstance(array.scale, CodedScale)
        if array.group not in BLOCKS or coded != self.double:
            raise ValueError(
                f"bitsandbytes' {self.kind} has blocks of {_listed(BLOCKS)}, not of {array.group}, and "
                f"{'quantised' if self.double else 'float32'} scales, as its config says"
            )
        return _pack_table(array, self.kind, table)

    def _scales(
        self, tensors: Mapping[str, np.ndarray], state: dict[str, Any], channels: int, row: int, storage: Storage
    ) -> np.ndarray | CodedScale:
        """As the storage says: their codes, or what they come to."""
        if not self.double:
            return over_runs(_finite(tensors, "weight.absmax").reshape(-1), self.block, channels, row)
        offset = np.asarray(state["nested_offset"], np.float32)
        table, nested = _finite(tensors, "weight.nested_quant_map"), _finite(tensors, "weight.nested_absmax")
        codes = tensors["weight.absmax"].reshape(-1)
        if nested.size != -(-codes.size // SCALES_PER_BLOCK):
            raise ValueError(f"weight.nested_absmax has {nested.size} scales for {codes.size} of weight.absmax")
        if storage.double:
            shape = (channels, row // self.block)
            return CodedScale(codes.reshape(shape), nested.reshape(-1), offset, table, shape)
        values = table[codes] * np.repeat(nested.reshape(-1), SCALES_PER_BLOCK)[: codes.size] + offset
        return over_runs(values, self.block, channels, row)

    def _keeps_coded(self, group: int) -> bool:
        """Whether `CodedScale` can hold the scales: not where a code would have to be there several times."""
        return group == self.block

    def _found_shape(self, suffix: str, default: tuple[int, ...]) -> tuple[int, ...]:
        return self.found[suffix].shape if suffix in self.found else default


def _unpack_int8(tensors: Mapping[str, np.ndarray], channels: int, row: int) -> QuantArray:
    stored_as = tensors.get("weight_format")
    if stored_as is not None and stored_as.reshape(-1)[:1] != _ROW_FORMAT:
        raise ValueError(f"weight_format is {stored_as.reshape(-1)[0]}, a GPU's own order; save it again in rows")
    return QuantArray(
        codes=tensors["weight"],
        scale=(_finite(tensors, "SCB") * _INVERSE_127).reshape(channels, 1),
        offset=None,
        codebook=None,
        bits=8,
        group=row,
        axis=1,
        shape=(channels, row),
    )


def _pack_int8(array: QuantArray) -> dict[str, np.ndarray]:
    if array.codes.dtype != np.int8 or array.group != array.row:
        raise ValueError("bitsandbytes' int8 holds int8 codes with a scale an output only")
    return {
        "weight": np.asarray(array.codes).reshape(array.channels, array.row),
        "SCB": np.asarray(array.scale, np.float32).reshape(-1) * np.float32(127),
        "weight_format": np.array(_ROW_FORMAT, np.uint8),
    }


def _pack_table(array: QuantArray, kind: str, table: np.ndarray) -> dict[str, np.ndarray]:
    state: dict[str, Any] = {"quant_type": kind, "blocksize": array.group, "dtype": array.dtype}
    state["shape"] = [array.channels, array.row]
    tensors = {
        "weight": _swap_nibbles(np.asarray(array.codes)).reshape(-1, 1),
        "weight.quant_map": table,
    }
    scale = array.scale
    if isinstance(scale, CodedScale):
        state |= {"nested_blocksize": SCALES_PER_BLOCK, "nested_dtype": "float32"}
        state["nested_offset"] = float(np.asarray(scale.offset))
        tensors |= {
            "weight.absmax": np.asarray(scale.codes).reshape(-1),
            "weight.nested_absmax": np.asarray(scale.scale, np.float32),
            "weight.nested_quant_map": np.asarray(scale.codebook, np.float32),
        }
    else:
        tensors["weight.absmax"] = np.asarray(scale, np.float32).reshape(-1)
    tensors[_STATE + kind] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return tensors


def _read_state(suffix: str, data: np.ndarray, double: bool) -> dict[str, Any]:
    """The JSON, with the fields that the layout reads checked."""
    try:
        said = json.loads(data.tobytes())
        state: dict[str, Any] = {"shape": [int(size) for size in said["shape"]], "blocksize": int(said["blocksize"])}
        if double:
            state |= {"nested_offset": float(said["nested_offset"]), "nested_blocksize": int(said["nested_blocksize"])}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{suffix} is not the JSON of a quant state ({error!r}); repair the checkpoint") from error
    if state["blocksize"] < 1 or not np.isfinite(state.get("nested_offset", 0.0)):
        raise ValueError(f"{suffix} has the impossible values {state}; repair the checkpoint")
    if state.get("nested_blocksize", SCALES_PER_BLOCK) != SCALES_PER_BLOCK:
        raise ValueError(f"{suffix} has nested_blocksize {state['nested_blocksize']}; only {SCALES_PER_BLOCK} is read")
    return state


def _finite(tensors: Mapping[str, np.ndarray], suffix: str) -> np.ndarray:
    values = tensors[suffix]
    if not np.isfinite(values).all():
        raise ValueError(f"{suffix} holds NaN or infinity; repair the checkpoint")
    return values


def _swap_nibbles(packed: np.ndarray) -> np.ndarray:
    return (packed >> 4) | (packed << 4)


def _bytes(spec: TensorSpec) -> int:
    """Of a tensor of packed codes: `bnb_4bit_quant_storage` lets them pass as numbers of other types."""
    size = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}.get(str(spec.dtype), 1)
    return size * int(np.prod(spec.shape))


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
