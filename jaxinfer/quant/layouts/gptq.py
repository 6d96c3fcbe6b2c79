"""GPTQ checkpoints (arXiv:2210.17323) as AutoGPTQ and GPTQModel write them.

``weight[n, k] = (code[k, n] - zero[g, n]) * scale[g, n]`` with ``g = g_idx[k]``. Words hold neighbouring inputs of
codes and neighbouring outputs of zero points, the first in the lowest bits. Format "gptq" stores zero points less 1,
modulo their bits; "gptq_v2" as they are. (GPTQModel takes the 1 from whole words, so that a zero point 0 borrows from
its neighbour.) With act-order (`desc_act`) the inputs of a group lie anywhere in a row; they are stored here sorted by
group.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.layouts.layout import FLOATS, TensorSpec, keep
from jaxinfer.quant.layouts.words import codes_of, inputs_in_order, rows_in_order, transposed, words_of
from jaxinfer.quant.layouts.zero_points import half_scales, offsets_of, zero_points
from jaxinfer.quant.storage import FloatType, Storage

NEGATIVE = "-:"
"""Begins a rule of GPTQModel's `dynamic` that names modules which are not quantised; others change their settings."""
SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "bits": (4, 8),
    "checkpoint_format": ("gptq", "gptq_v2", None, ""),
    "is_marlin_format": (False, None),
    "pack_dtype": ("int32", None),
    "desc_act": (False, True, None),
    "sym": (False, True, None),
    "lm_head": (False, True, None),
}


@dataclass(frozen=True)
class GPTQLayout:
    """See `jaxinfer.quant.layouts.layout.Layout`.

    Attributes:
        bits: 4 or 8.
        group: inputs that share a scale, -1 for all of a channel.
        act_order: whether a module has an order of its inputs.
        symmetric: whether all zero points are the middle of the codes.
        plain_zeros: whether zero points are stored as they are: "gptq_v2".
        borrowing: whether the 1 was taken from whole words: of GPTQModel.
        head: whether the output head is quantised.
        inside: the modules of a block that are quantised, empty for all.
        skipped: regular expressions of the beginnings of names of modules that are not: negative rules of `dynamic`.
    """

    bits: int = 4
    group: int = 128
    act_order: bool = False
    symmetric: bool = True
    plain_zeros: bool = False
    borrowing: bool = False
    head: bool = False
    inside: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    method: str = field(default="gptq", init=False)
    names: tuple[str, ...] = field(default=("gptq",), init=False)
    ordering: str = field(default="g_idx", init=False)
    unread: tuple[str, ...] = field(default=(), init=False)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "GPTQLayout":
        """Reads the settings of AutoGPTQ, GPTQModel and transformers, also out of a quantize_config.json."""
        said = {"bits": None, **config, "checkpoint_format": config.get("checkpoint_format", config.get("format"))}
        keep(said, SUPPORTED, "gptq")
        group = said.get("group_size", 128)
        if isinstance(group, bool) or not isinstance(group, int) or (group != -1 and (group < 2 or group % 2)):
            raise ValueError(f"quantization_config of gptq has group_size={group!r}; it is even, or -1 for a whole row")
        inside = _inside(said.get("modules_in_block_to_quantize") or ())
        skipped = _skipped(said.get("dynamic") or {})
        flags = {name: bool(said.get(name)) for name in ("desc_act", "sym", "lm_head")}
        meta = said.get("meta")
        quantizer = str(meta.get("quantizer")) if isinstance(meta, Mapping) else ""
        plain = said["checkpoint_format"] == "gptq_v2"
        return cls(
            bits=said["bits"],
            group=group,
            act_order=flags["desc_act"],
            symmetric=flags["sym"],
            plain_zeros=plain,
            borrowing=not plain and not flags["sym"] and "gptqmodel" in quantizer.lower(),
            head=flags["lm_head"],
            inside=inside,
            skipped=skipped,
        )

    def config(self) -> dict[str, Any]:
        """As transformers and AutoGPTQ read it from config.json."""
        said: dict[str, Any] = {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group,
            "desc_act": self.act_order,
            "sym": self.symmetric,
            "lm_head": self.head,
            "checkpoint_format": "gptq_v2" if self.plain_zeros else "gptq",
            "true_sequential": True,
        }
        said |= {"meta": {"quantizer": ["gptqmodel:7.7.0"]}} if self.borrowing else {}
        said |= {"dynamic": {NEGATIVE + pattern: {} for pattern in self.skipped}} if self.skipped else {}
        return said | ({"modules_in_block_to_quantize": [list(self.inside)]} if self.inside else {})

    def __str__(self) -> str:
        group = "per output channel" if self.group == -1 else f"in groups of {self.group}"
        zeros = "" if self.symmetric else ", asymmetric"
        return f"gptq, {self.bits} bits {group}{zeros}" + (", act-order" if self.act_order else "")

    def covers(self, module: str) -> bool:
        """All layers of blocks, or those named, and the head if it says so."""
        if any(re.match(pattern, module) for pattern in self.skipped):
            return False
        if module in ("lm_head", "embed_out"):
            return self.head
        return not self.inside or module.endswith(tuple(f".{name}" for name in self.inside))

    def of(self, module: str, tensors: Mapping[str, TensorSpec]) -> "GPTQLayout":
        """The same for all modules."""
        return self

    def shapes(self, channels: int, row: int) -> dict[str, TensorSpec]:
        """The four tensors of a module; the last may be missing."""
        group, per_word = self._group(row), 32 // self.bits
        for name, size in (("in_features", row), ("out_features", channels)):
            if size % per_word:
                raise ValueError(f"{name}={size} is no multiple of {per_word}, which GPTQ packs into a word")
        if row % group and self._stored_group(row) < 8:
            raise ValueError(f"in_features={row} and group_size={group} have no common divisor of at least 8")
        groups = -(-row // group)
        return {
            "qweight": TensorSpec((row // per_word, channels), "int32"),
            "qzeros": TensorSpec((groups, channels // per_word), "int32"),
            "scales": TensorSpec((groups, channels), FLOATS),
            "g_idx": TensorSpec((row,), "int32", required=self._ordered(row)),
        }

    def storage(self, row: int, dtypes: Mapping[str, str]) -> Storage:
        """int4 or int8 with the file's scales; int8 without offsets where the zero points are in the middle."""
        scales: FloatType = dtypes["scales"]  # type: ignore[assignment]
        offsets: FloatType | None = "float32"
        if self.symmetric:
            offsets = scales if self.bits == 4 else None
        return Storage(
            "int4" if self.bits == 4 else "int8",
            self._stored_group(row),
            symmetric=self.symmetric,
            scales=scales,
            offsets=offsets,
            ordered=self._ordered(row),
        )

    def unpack(self, tensors: Mapping[str, np.ndarray], channels: int, row: int) -> QuantArray:
        """See `Layout.unpack`."""
        order = self._order(tensors.get("g_idx"), row)
        scale = transposed(tensors["scales"])
        zero = self._zeros(tensors["qzeros"])
        words = np.ascontiguousarray(tensors["qweight"], "<i4")
        codes: Any = transposed(words).view(np.uint8) if order is None else _sorted(words, order, self.bits)
        if self.bits == 8:
            codes = (codes ^ 0x80).view(np.int8)
        repeats = self._group(row) // self._stored_group(row)
        if repeats > 1:  # groups that do not divide a row are kept as smaller ones that do
            parts = row // self._stored_group(row)
            scale, zero = (np.repeat(part, repeats, axis=1)[:, :parts] for part in (scale, zero))
        return QuantArray(
            codes=codes,
            scale=scale,
            offset=self._offset(zero, scale),
            codebook=None,
            bits=self.bits,
            group=self._stored_group(row),
            axis=1,
            shape=(channels, row),
            order=order if self._ordered(row) else None,
        )

    def pack(self, array: QuantArray) -> dict[str, np.ndarray]:
        """See `Layout.pack`. Scales are stored in float16."""
        channels, row = array.channels, array.row
        specs = self.shapes(channels, row)
        if array.bits != self.bits or array.codebook is not None or np.asarray(array.codes).dtype.kind not in "iu":
            raise ValueError(f"this GPTQ layout stores integers of {self.bits} bits")
        if array.group != self._group(row):
            raise ValueError(f"groups are of {array.group} inputs, and group_size={self.group}")
        if array.order is not None and not self.act_order:
            raise ValueError("the inputs have an order of their own, which needs desc_act")
        middle = 1 << (self.bits - 1)
        scale = half_scales(array)
        zero = zero_points(array, scale, 0 if self.bits == 4 else middle, 2 * middle - 1)
        if self.symmetric and not (zero[scale != 0] == middle).all():
            raise ValueError(f"sym says that all zero points are {middle}")
        codes = np.asarray(array.codes).reshape(channels, -1)
        codes = codes.view(np.uint8) ^ 0x80 if self.bits == 8 else codes
        order = np.arange(row, dtype=np.int32) if array.order is None else np.asarray(array.order)
        groups = np.empty(row, np.int32)
        groups[order] = np.arange(row, dtype=np.int32) // array.group
        if array.order is not None:
            codes = inputs_in_order(codes, np.argsort(order), self.bits)
        zero = transposed(zero)
        if not self.plain_zeros and not self.borrowing:
            zero = (zero - np.uint8(1)) & np.uint8(2 * middle - 1)
        words = words_of(zero, self.bits)
        packed = {
            "qweight": transposed(np.ascontiguousarray(codes).view("<i4")).astype(np.int32, copy=False),
            "qzeros": (words.view(np.uint32) - self._ones()).view(np.int32) if self.borrowing else words,
            "scales": transposed(scale),
            "g_idx": groups,
        }
        assert all(packed[name].shape == spec.shape for name, spec in specs.items())
        return packed

    def _group(self, row: int) -> int:
        return row if self.group == -1 else self.group

    def _stored_group(self, row: int) -> int:
        return math.gcd(row, self._group(row))

    def _ordered(self, row: int) -> bool:
        return self.act_order and self._group(row) < row

    def _order(self, groups: np.ndarray | None, row: int) -> np.ndarray | None:
        """The inputs sorted by group; None where they are that already and need not be."""
        if groups is None:
            return None
        natural = np.arange(row) // self._group(row)
        if not self._ordered(row):
            if not np.array_equal(groups, natural):
                raise ValueError("g_idx puts inputs into other groups than their neighbours', but desc_act is false")
            return None
        order = np.argsort(groups, kind="stable").astype(np.int32)
        if not np.array_equal(groups[order], natural):
            raise ValueError(f"g_idx does not give each group its {self._group(row)} inputs")
        return order

    def _zeros(self, words: np.ndarray) -> np.ndarray:
        """uint8 ``[N, K / group]``."""
        if self.borrowing:
            words = (np.ascontiguousarray(words).view(np.uint32) + self._ones()).view(np.int32)
        zero = transposed(codes_of(words, self.bits))
        return zero if self.plain_zeros or self.borrowing else (zero + np.uint8(1)) & np.uint8((1 << self.bits) - 1)

    def _ones(self) -> np.uint32:
        """A word whose codes are all 1."""
        return np.uint32(0x11111111 if self.bits == 4 else 0x01010101)

    def _offset(self, zero: np.ndarray, scale: np.ndarray) -> np.ndarray | None:
        middle = 1 << (self.bits - 1)
        if not np.isfinite(scale).all():
            raise ValueError("scales holds a value that is not finite")
        if not self.symmetric:
            return offsets_of(zero if self.bits == 4 else zero.astype(np.float32) - middle, scale, "scales")
        if not (zero == middle).all():
            raise ValueError(f"qzeros holds other zero points than {middle}, but sym is true; set it to false")
        if self.bits == 8:
            return None
        return offsets_of(zero, scale, "scales", scale.dtype.name)


def _inside(blocks: Any) -> tuple[str, ...]:
    """The names in `modules_in_block_to_quantize`, which is a list of them, or of lists of them."""
    if isinstance(blocks, list | tuple):
        lists = [[block] if isinstance(block, str) else block for block in blocks]
        if all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists):
            return tuple(name for names in lists for name in names)
    raise ValueError(f"quantization_config of gptq has modules_in_block_to_quantize={blocks!r}; names in lists")


def _skipped(rules: Any) -> tuple[str, ...]:
    """The patterns of `dynamic`, whose rules are all negative."""
    if not isinstance(rules, Mapping):
        raise ValueError(f"quantization_config of gptq has dynamic={rules!r}; it maps patterns of names to settings")
    for rule in rules:
        if not rule.startswith(NEGATIVE):
            raise ValueError(
                f"quantization_config of gptq has dynamic with settings of their own for {rule!r}, which is not "
                f"supported: only rules that begin with {NEGATIVE!r} and leave modules in floats are. Use a checkpoint "
                "without, or the unquantised one and have it quantised while it is read (quantization='int4')"
            )
        try:
            re.compile(rule.removeprefix(NEGATIVE))
        except re.error as error:
            raise ValueError(
                f"quantization_config of gptq has dynamic with {rule!r}, no regular expression ({error})"
            ) from error
    return tuple(rule.removeprefix(NEGATIVE) for rule in rules)


def _sorted(words: np.ndarray, order: np.ndarray, bits: int) -> np.ndarray:
    """Codes ``[N, K]``, packed along K, with input ``order[j]`` in place j, of int32 ``[K * bits / 32, N]``."""
    rows, channels = words.shape
    stored = np.empty((4 * rows, channels), np.uint8)  # an input, or two, a row
    for place in range(4):
        stored[place::4] = words.view(np.uint8)[:, place::4]
    return transposed(rows_in_order(stored, order, bits))
