"""The layout "fp8" of DeepSeek-V3 and Qwen3: float8_e4m3fn weights with a scale a block of 128 by 128, or one scale.

``weight * weight_scale_inv`` is the matrix: the scale is a factor in spite of its name. Blocks begin at the first
output and input and end with the matrix (https://huggingface.co/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md). Without
blocks there is one scale for all, ``weight_scale`` in AutoFP8's checkpoints. Activations are multiplied as they are
with blocks, which is closer to the unquantised model than rounding them; with one scale they are rounded where the
product can, each token with a scale of its own, and stored ranges are not used.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.layouts.blocks import group_in_blocks, over_rectangles, rectangles_of
from jaxinfer.quant.layouts.layout import FLOATS, TensorSpec, keep
from jaxinfer.quant.layouts.skipped_modules import checked_patterns, is_skipped
from jaxinfer.quant.storage import Storage

FP8 = ml_dtypes.float8_e4m3fn
_SCALES = ("weight_scale_inv", "weight_scale")
_UNUSED = ("input_scale", "activation_scale", "output_scale")
KV_CACHE = (".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".q_zero_point", ".k_zero_point", ".v_zero_point")
"""Endings of static ranges of queries, keys and values, which caches here do not take: a page has its own."""
STATIC_ACTIVATIONS = "activations are rounded with a scale for each token in place of the checkpoint's static ones"
STATIC_KV_CACHE = "the KV cache is as kv_cache_dtype says"
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "fmt": (None, "e4m3"),
    "activation_scheme": ("dynamic", "static"),
    "scale_fmt": (None, "float", "ue8m0"),
    "expert_dtype": (None, "fp8"),
    "modules_to_convert": (None, []),
    "is_checkpoint_fp8_serialized": (True,),
}


@dataclass(frozen=True)
class Fp8Layout:
    """Float8 weights with scales of blocks or of a whole matrix.

    Attributes:
        block: outputs and inputs of a block; None for one scale a matrix.
        skipped: patterns of modules that are in floats, as for `is_skipped`.
        activations: "dynamic" or "static", as the checkpoint says.
        found: what the checkpoint has of the module that this is the layout of.
    """

    block: tuple[int, int] | None = (128, 128)
    skipped: tuple[str, ...] | None = None
    activations: str = "dynamic"
    found: Mapping[str, TensorSpec] = field(default_factory=dict, compare=False, repr=False)
    method: str = field(default="fp8", init=False)
    names: tuple[str, ...] = field(default=("fp8",), init=False)
    ordering: str = field(default="", init=False)
    unread: tuple[str, ...] = field(default=KV_CACHE, init=False)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Fp8Layout":
        """See `Layout`. Warns of what is rounded in another way."""
        keep(config, _ALLOWED, "fp8")
        block = config.get("weight_block_size")
        if block is not None and not (
            isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
        ):
            raise ValueError(
                f"quantization_config of fp8 has weight_block_size={block!r}, which must be two positive numbers, "
                "or null for one scale a matrix"
            )
        notes = [STATIC_ACTIVATIONS] if config.get("activation_scheme") == "static" else []
        notes += [STATIC_KV_CACHE] if config.get("kv_cache_scheme") else []
        if notes:
            warnings.warn(f"the checkpoint's fp8 config is not followed in all: {'; '.join(notes)}", stacklevel=2)
        key = "modules_to_not_convert" if config.get("modules_to_not_convert") is not None else "ignored_layers"
        return cls(
            block=None if block is None else (block[0], block[1]),
            skipped=checked_patterns(key, config.get(key)),
            activations=config.get("activation_scheme", "dynamic"),
        )

    def config(self) -> dict[str, Any]:
        """See `Layout`."""
        said: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": self.activations}
        said["weight_block_size"] = None if self.block is None else list(self.block)
        if self.skipped is not None:
            said["modules_to_not_convert"] = list(self.skipped)
        return said

    def __str__(self) -> str:
        return "fp8, " + ("a scale a matrix" if self.block is None else "in blocks of {} by {}".format(*self.block))

    def covers(self, module: str) -> bool:
        """See `Layout`."""
        return not is_skipped(module, self.skipped)

    def of(self, module: str, tensors: Mapping[str, TensorSpec]) -> "Fp8Layout":
        """See `Layout`."""
        return replace(self, found=dict(tensors))

    def shapes(self, channels: int, row: int) -> Mapping[str, TensorSpec]:
        """See `Layout`."""
        scale = self._scale_name
        specs = {"weight": TensorSpec((channels, row), "float8_e4m3fn")}
        if self.block is not None:
            grid = (-(-channels // self.block[0]), -(-row // self.block[1]))
            specs[scale] = TensorSpec(grid, (*FLOATS, "float8_e8m0fnu", "uint8"))
        else:
            shape = self.found[scale].shape if scale in self.found else ()
            specs[scale] = TensorSpec(shape if shape in ((), (1,), (1, 1)) else (1,), FLOATS)
        unused = {name: self.found[name]._replace(required=False) for name in _UNUSED if name in self.found}
        return specs | unused

    def storage(self, row: int, dtypes: Mapping[str, str]) -> Storage:
        """See `Layout`."""
        group = self._group(row)
        return Storage("fp8", 0 if group == row else group, act_bits=self._act_bits)

    def unpack(self, tensors: Mapping[str, np.ndarray], channels: int, row: int) -> QuantArray:
        """See `Layout`."""
        name = self._scale_name
        scale = _scale_values(tensors[name])
        if not np.isfinite(scale).all():
            raise ValueError(f"{name} holds NaN or infinity; repair the checkpoint")
        block = self.block or (channels, row)
        return QuantArray(
            codes=checked_codes(tensors["weight"]),
            scale=over_rectangles(scale.reshape(-(-channels // block[0]), -1), block, channels, row),
            offset=None,
            codebook=None,
            bits=8,
            group=self._group(row),
            axis=1,
            shape=(channels, row),
            act_bits=self._act_bits,
        )

    def pack(self, array: QuantArray) -> dict[str, np.ndarray]:
        """See `Layout`: the scales of a block must be the same."""
        channels, row = array.channels, array.row
        if array.codes.dtype != FP8 or array.offset is not None or array.order is not None:
            raise ValueError(f"the fp8 layout holds float8_e4m3fn codes alone, not {array.bits} bits of another kind")
        scale = np.asarray(array.scale, np.float32).reshape(channels, -1)
        scale = rectangles_of(scale, self.block or (channels, row), channels, row)
        return {
            "weight": np.asarray(array.codes).reshape(channels, row),
            self._scale_name: scale if self.block is not None else scale.reshape(()),
        }

    @property
    def _act_bits(self) -> int:
        return 16 if self.block is not None else 8

    def _group(self, row: int) -> int:
        return row if self.block is None else group_in_blocks(self.block[1], row, runs_on=False)

    @property
    def _scale_name(self) -> str:
        return next((name for name in _SCALES if name in self.found), _SCALES[0])


def checked_codes(weight: np.ndarray) -> np.ndarray:
    """Float8 codes.

    Raises:
        ValueError: one is NaN.
    """
    if ((weight.view(np.uint8) & 0x7F) == 0x7F).any():
        raise ValueError("weight holds NaN; repair the checkpoint")
    return weight


def _scale_values(scale: np.ndarray) -> np.ndarray:
    """float32; bytes are exponents of 2."""
    if scale.dtype == np.uint8:
        scale = scale.view(ml_dtypes.float8_e8m0fnu)
    return scale.astype(np.float32)
