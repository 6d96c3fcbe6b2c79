"""AutoAWQ's checkpoints in the "gemm" version (arXiv:2306.00978).

``weight[n, k] = (code[k, n] - zero[k // group, n]) * scale[k // group, n]`` with 4 bits of codes and zero points. Words
hold 8 neighbouring outputs, not in their order: that of the lowest bits is output 0, then come 2, 4, 6, 1, 3, 5 and 7.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.layouts.layout import FLOATS, TensorSpec, keep
from jaxinfer.quant.layouts.words import codes_of, transposed, words_of
from jaxinfer.quant.layouts.zero_points import half_scales, offsets_of, zero_points
from jaxinfer.quant.quantize import unpack_nibbles
from jaxinfer.quant.storage import FloatType, Storage

BITS, PER_WORD = 4, 8
OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of a word's nibbles, from the lowest."""
PLACES = tuple(OUTPUTS.index(output) for output in range(PER_WORD))
"""Of a word's outputs."""


@dataclass(frozen=True)
class AWQLayout:
    """See `jaxinfer.quant.layouts.layout.Layout`.

    Attributes:
        group: inputs that share a scale, -1 for all of a channel.
        skipped: a module with one of these in its name is not quantised.
    """

    group: int = 128
    skipped: tuple[str, ...] = ()
    method: str = field(default="awq", init=False)
    names: tuple[str, ...] = field(default=("awq",), init=False)
    ordering: str = field(default="", init=False)
    unread: tuple[str, ...] = field(default=(), init=False)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "AWQLayout":
        """Reads AutoAWQ's settings, also by the names of its own quant_config.json, and GPTQModel's."""
        said = {"bits": config.get("w_bit", 4), "group_size": config.get("q_group_size", 128), **config}
        version = said.get("version") or said.get("checkpoint_format") or said.get("format") or "gemm"
        said["version"] = str(version).lower()
        keep(said, {"version": ("gemm",), "bits": (BITS,), "zero_point": (True, None)}, "awq")
        group, skipped = said["group_size"], said.get("modules_to_not_convert") or ()
        if isinstance(group, bool) or not isinstance(group, int) or (group != -1 and (group < 2 or group % 2)):
            raise ValueError(f"quantization_config of awq has group_size={group!r}; it is even, or -1 for a whole row")
        if not isinstance(skipped, list | tuple) or not all(isinstance(name, str) for name in skipped):
            raise ValueError(
                f"quantization_config of awq has modules_to_not_convert={skipped!r}; it is a list of names"
            )
        return cls(group, tuple(skipped))

    def config(self) -> dict[str, Any]:
        """As AutoAWQ writes it into config.json."""
        return {
            "quant_method": "awq",
            "zero_point": True,
            "group_size": self.group,
            "bits": BITS,
            "version": "gemm",
            "modules_to_not_convert": list(self.skipped) or None,
        }

    def __str__(self) -> str:
        return f"awq, {BITS} bits " + ("per output channel" if self.group == -1 else f"in groups of {self.group}")

    def covers(self, module: str) -> bool:
        """All layers of blocks but those named otherwise; AutoAWQ leaves the head alone."""
        return module != "lm_head" and not any(name in module for name in self.skipped)

    def of(self, module: str, tensors: Mapping[str, TensorSpec]) -> "AWQLayout":
        """The same for all modules."""
        return self

    def shapes(self, channels: int, row: int) -> dict[str, TensorSpec]:
        """The three tensors of a module."""
        group = self._group(row)
        if channels % PER_WORD:
            raise ValueError(f"out_features={channels} is no multiple of {PER_WORD}, which AWQ packs into a word")
        if row % group or row % 2:
            raise ValueError(f"in_features={row} is no multiple of group_size={group}")
        groups, words = row // group, channels // PER_WORD
        return {
            "qweight": TensorSpec((row, words), "int32"),
            "qzeros": TensorSpec((groups, words), "int32"),
            "scales": TensorSpec((groups, channels), FLOATS),
        }

    def storage(self, row: int, dtypes: Mapping[str, str]) -> Storage:
        """Asymmetric int4 with the file's scales."""
        scales: FloatType = dtypes["scales"]  # type: ignore[assignment]
        return Storage("int4", self._group(row), symmetric=False, scales=scales, offsets="float32")

    def unpack(self, tensors: Mapping[str, np.ndarray], channels: int, row: int) -> QuantArray:
        """See `Layout.unpack`."""
        scale = transposed(tensors["scales"])
        nibbles = codes_of(tensors["qzeros"], BITS).reshape(-1, channels // PER_WORD, PER_WORD)
        zero = transposed(nibbles[:, :, PLACES].reshape(-1, channels))
        if not np.isfinite(scale).all():
            raise ValueError("scales holds a value that is not finite")
        return QuantArray(
            codes=_pairs_of_inputs(tensors["qweight"], channels, row),
            scale=scale,
            offset=offsets_of(zero, scale, "scales"),
            codebook=None,
            bits=BITS,
            group=self._group(row),
            axis=1,
            shape=(channels, row),
        )

    def pack(self, array: QuantArray) -> dict[str, np.ndarray]:
        """See `Layout.pack`. Scales are stored in float16."""
        channels, row = array.channels, array.row
        specs = self.shapes(channels, row)
        if array.bits != BITS or array.codebook is not None or array.offset is None or array.order is not None:
            raise ValueError("AWQ stores integers of 4 bits with zero points, inputs in their own order")
        if array.group != self._group(row):
            raise ValueError(f"groups are of {array.group} inputs, and group_size={self.group}")
        scale = half_scales(array)
        zero = zero_points(array, scale, 0, 15)
        codes = unpack_nibbles(np.asarray(array.codes).reshape(channels, row // 2))
        parts = {name: transposed(part) for name, part in (("qweight", codes), ("qzeros", zero))}
        ordered = {name: part.reshape(len(part), -1, PER_WORD)[:, :, OUTPUTS] for name, part in parts.items()}
        words = {name: words_of(part.reshape(len(part), -1), BITS) for name, part in ordered.items()}
        packed = words | {"scales": transposed(scale)}
        assert all(packed[name].shape == spec.shape for name, spec in specs.items())
        return packed

    def _group(self, row: int) -> int:
        return row if self.group == -1 else self.group


def _pairs_of_inputs(words: np.ndarray, channels: int, row: int) -> np.ndarray:
    """uint8 ``[N, K / 2]``, two neighbouring inputs a byte, of int32 ``[K, N / 8]``, eight outputs a word."""
    stored = np.ascontiguousarray(words, "<i4").view(np.uint8).reshape(row // 2, 2, channels // 2)
    even, odd = stored[:, 0], stored[:, 1]
    low, high = (even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)  # of a byte's two outputs
    out = np.empty((channels // PER_WORD, PER_WORD, row // 2), np.uint8)
    for place, output in enumerate(OUTPUTS):
        half = high if place % 2 else low
        out[:, output] = transposed(half[:, place // 2 :: PER_WORD // 2])
    return out.reshape(channels, row // 2)
