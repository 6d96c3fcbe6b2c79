"""How one matrix is stored. Imports neither JAX nor NumPy."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["int8", "fp8", "int4", "nf4", "fp4"]
FloatType = Literal["float32", "bfloat16", "float16"]

BITS: dict[Kind, int] = {"int8": 8, "fp8": 8, "int4": 4, "nf4": 4, "fp4": 4}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SMALLEST_GROUP = 16
ROTATION = 64
"""Neighbouring inputs that are rotated with each other."""
SCALES_PER_BLOCK = 256
"""Scales that share a scale of their own under double quantisation."""


@dataclass(frozen=True)
class Storage:
    """A format of matrices ``[N, K]``, N output channels of K inputs each.

    Attributes:
        kind: what a code stands for: an integer ("int8" -127..127, "int4" 4 bits), a float8_e4m3fn ("fp8"), or an entry
            of bitsandbytes' table of 16 values ("nf4", "fp4").
        group: neighbouring inputs of a channel that share a scale; 0 is all of them.
        symmetric: of "int4": the code 8 is zero; else each group has a zero point of its own.
        act_bits: 8 if activations are rounded to the codes' dtype as well, each token with a scale of its own; else 16.
            Of "fp8" only where tensor cores multiply such numbers (compute capability 8.9), elsewhere it is as 16.
        double: scales are codes of 8 bits themselves, in blocks of `SCALES_PER_BLOCK`.
        scales: dtype of the scales where it is not the kind's own, as a file has them.
        offsets: dtype of the offsets likewise; None for a format without.
        ordered: inputs are stored in an order of the matrix's own.
        rotated: blocks of `ROTATION` inputs are rotated before they are rounded, those of activations as well; see
            `jaxinfer.quant.rotation`.
    """

    kind: Kind
    group: int = 0
    symmetric: bool = True
    act_bits: int = 16
    double: bool = False
    scales: FloatType | None = None
    offsets: FloatType | Literal[""] | None = ""
    ordered: bool = False
    rotated: bool = False

    @property
    def scale_dtype(self) -> str:
        """Of the scales: bfloat16 for groups of 4 bits, whose scales are many."""
        return self.scales or ("bfloat16" if self.kind == "int4" else "float32")

    @property
    def offset_dtype(self) -> str | None:
        """Of the offsets, which are whole multiples of the scales, exactly; None for a format without."""
        if self.offsets != "":
            return self.offsets
        if self.kind != "int4":
            return None
        return "bfloat16" if self.symmetric else "float32"

    @property
    def bits(self) -> int:
        """Of a code."""
        return BITS[self.kind]

    def group_of(self, row: int) -> int:
        """The size of a group in rows of `row` inputs."""
        return self.group or row

    def nbytes(self, channels: int, row: int) -> int:
        """Bytes of a matrix ``[channels, row]`` with its scales, offsets, tables and order."""
        scales = channels * row // self.group_of(row)
        codes = channels * row * self.bits // 8
        offsets = scales * _BYTES[self.offset_dtype] if self.offset_dtype else 0
        table = 4 * 16 if self.kind in ("nf4", "fp4") else 0
        nested = scales + 4 * -(-scales // SCALES_PER_BLOCK) + 4 + 4 * 256
        order = 4 * row if self.ordered else 0
        return codes + (nested if self.double else scales * _BYTES[self.scale_dtype]) + offsets + table + order

    def __str__(self) -> str:
        grouped = f" in groups of {self.group}" if self.group else " per output channel"
        where = " on GPUs of compute capability 8.9 or later" if self.kind == "fp8" else ""
        details = [
            "" if self.symmetric else "asymmetric",
            "quantised scales" if self.double else "",
            "" if self.act_bits == 16 else f"activations in {self.kind}{where}",
            "inputs in an order of their own" if self.ordered else "",
            "inputs rotated" if self.rotated else "",
        ]
        return ", ".join([self.kind + grouped, *filter(None, details)])


def fitting(wanted: Storage, row: int, last: int) -> Storage:
    """The format for rows of `row` inputs whose last axis is `last`.

    Groups are halved until they divide the row. Where none of at least `SMALLEST_GROUP` does, or a byte of 4-bit codes
    would reach over the last axis, it is int8 per output channel.
    """
    if wanted.bits == 4 and last % 2:
        return Storage("int8", act_bits=wanted.act_bits)
    group = wanted.group
    while group > SMALLEST_GROUP and row % group:
        group //= 2
    if group and row % group:
        return Storage("int8", act_bits=wanted.act_bits)
    return replace(wanted, group=group)


Method = Literal["int8", "int8_w8a8", "fp8", "int4", "nf4", "fp4", "gguf"]
CheckpointMethod = Literal["awq", "gptq", "compressed-tensors", "bitsandbytes"]
"""Methods that are read from a checkpoint only. ("fp8" is either.)"""
FORMATS: Mapping[Method | CheckpointMethod, Storage] = {
    "int8": Storage("int8"),
    "int8_w8a8": Storage("int8", act_bits=8),
    "fp8": Storage("fp8", act_bits=8),
    "int4": Storage("int4", 128),
    "nf4": Storage("nf4", 64),
    "fp4": Storage("fp4", 64),
    "gguf": Storage("int8", 32),  # for tensors of other types than those whose codes are taken over
}
"""Method -> format of a layer's matrices, unless the plan says otherwise."""
