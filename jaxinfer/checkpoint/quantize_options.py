"""What `quantize_checkpoint` is asked for, checked before anything is read. Imports neither JAX nor NumPy."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from jaxinfer.quant.storage import FORMATS, Method

OfflineMethod = Literal["int8", "int8_w8a8", "fp8", "int4", "nf4", "fp4", "awq", "gptq"]
CALIBRATED = ("awq", "gptq")
GROUPED = ("int4", *CALIBRATED)
BLOCKED = ("nf4", "fp4")
GROUP_SIZES = (32, 64, 128, 256, -1)
BLOCK_SIZES = (32, 64, 128, 256)
BUILTIN = "builtin"
SAMPLES, SEQ_LEN, DAMP = 128, 512, 0.01


@dataclass(frozen=True)
class QuantizeOptions:
    """See `jaxinfer.checkpoint.quantize.quantize_checkpoint`; what is None there has its value here, but for the group.

    Raises:
        ValueError: a value is out of range, or of no use with the method; names option, value and remedy.
        TypeError: a value is of the wrong type.
    """

    method: OfflineMethod
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    double_quant: bool = False
    quantize_head: bool = False
    desc_act: bool | None = None
    static_groups: bool | None = None
    damp_percent: float | None = None
    calibration: str | Path | None = None
    num_samples: int | None = None
    seq_len: int | None = None

    def __post_init__(self) -> None:
        methods = OfflineMethod.__args__  # type: ignore[attr-defined]
        if self.method not in methods:
            raise ValueError(f"method={self.method!r} must be one of {', '.join(methods)}")
        for name in ("double_quant", "quantize_head", "desc_act", "static_groups"):
            value = getattr(self, name)
            if not isinstance(value, bool) and (value is not None or name in ("double_quant", "quantize_head")):
                raise TypeError(f"{name}={value!r} must be True or False")
        self._check_bits()
        self._check_group()
        self._check_rounding()
        self._check_calibration()
        object.__setattr__(self, "bits", self.code_bits)
        if self.method in GROUPED:
            object.__setattr__(self, "symmetric", self.method != "awq" if self.symmetric is None else self.symmetric)
        if self.method == "gptq":
            static = self.desc_act is None if self.static_groups is None else self.static_groups
            order = {"desc_act": self.desc_act is not False, "static_groups": static}
            for name, value in (order | {"damp_percent": self.damp_percent or DAMP}).items():
                object.__setattr__(self, name, value)
        if self.calibrated:
            for name, default in (("calibration", BUILTIN), ("num_samples", SAMPLES), ("seq_len", SEQ_LEN)):
                if getattr(self, name) is None:
                    object.__setattr__(self, name, default)

    @property
    def calibrated(self) -> bool:
        """Whether the method looks at activations."""
        return self.method in CALIBRATED

    @property
    def code_bits(self) -> int:
        """Of a code: 4 or 8."""
        return 4 if self.method in (*GROUPED, *BLOCKED) else 8

    @property
    def rounding(self) -> Method:
        """The method that rounds without looking at activations, to the same kind of codes."""
        return "int4" if self.method in CALIBRATED else self.method  # type: ignore[return-value]

    def with_group(self, rows: Mapping[str, int]) -> "QuantizeOptions":
        """The group size settled: as it was given, or the largest up to the method's own that every layer takes.

        Args:
            rows: name of each linear layer that is quantised -> its inputs.

        Raises:
            ValueError: it does not divide a layer's inputs; names both.
        """
        if self.group_size == -1 or (self.code_bits == 8 and self.group_size is None):
            return self
        sizes = BLOCK_SIZES if self.method in BLOCKED else GROUP_SIZES[:-1]
        fitting = [size for size in sizes if all(row % size == 0 for row in rows.values())]
        usual = FORMATS[self.rounding].group
        group = self.group_size or max((size for size in fitting if size <= usual), default=usual)
        for name, row in rows.items():
            if row % group:
                others = f"give one of {', '.join(map(str, fitting))}" if fitting else "none of the sizes does"
                whole = "" if self.method in BLOCKED else ", or -1 for a scale for each output channel"
                raise ValueError(f"group_size={group} does not divide the {row} inputs of {name}; {others}{whole}")
        return replace(self, group_size=group)

    def identity(self) -> dict[str, Any]:
        """What decides the result, of JSON's types; the calibration text not by its name."""
        return {key: value for key, value in asdict(self).items() if value is not None and key != "calibration"}

    def _check_bits(self) -> None:
        if self.bits is not None and (isinstance(self.bits, bool) or self.bits != self.code_bits):
            raise ValueError(
                f"bits={self.bits!r} is not supported with method={self.method!r}, which has {self.code_bits}"
            )

    def _check_group(self) -> None:
        if self.group_size is None:
            return
        if self.code_bits == 8 and self.method != "int8":
            raise ValueError(
                f"group_size={self.group_size} is of 'int8' and 4-bit methods; {self.method!r} has a scale a channel"
            )
        sizes = BLOCK_SIZES if self.method in BLOCKED else GROUP_SIZES
        if isinstance(self.group_size, bool) or self.group_size not in sizes:
            whole = "" if self.method in BLOCKED else " (-1 is all of a channel)"
            raise ValueError(
                f"group_size={self.group_size!r} must be one of {', '.join(map(str, sizes))}{whole} with "
                f"method={self.method!r}"
            )

    def _check_rounding(self) -> None:
        if self.symmetric is not None:
            if not isinstance(self.symmetric, bool):
                raise TypeError(f"symmetric={self.symmetric!r} must be True or False")
            if self.method not in GROUPED:
                raise ValueError(
                    f"symmetric={self.symmetric} is of 'int4' and 'gptq', not of {self.method!r}; leave it out"
                )
            if self.method == "awq" and self.symmetric:
                raise ValueError("symmetric=True is not supported with 'awq', whose layout has zero points; use 'gptq'")
        if self.double_quant and self.method not in BLOCKED:
            raise ValueError(f"double_quant=True is of 'nf4' and 'fp4', not of {self.method!r}; leave it out")
        if self.quantize_head and self.code_bits == 4:
            raise ValueError(
                f"quantize_head=True is not supported with {self.method!r}: readers of its layout expect the head in "
                "floats. Leave it out, or use 'int8', 'int8_w8a8' or 'fp8'"
            )

    def _check_calibration(self) -> None:
        for name in ("calibration", "num_samples", "seq_len"):
            value = getattr(self, name)
            if value is None:
                continue
            if not self.calibrated:
                raise ValueError(
                    f"{name}={value!r} is of 'awq' and 'gptq'; {self.method!r} looks at no text. Leave it out"
                )
            if name != "calibration" and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name}={value!r} must be an int")
            if name != "calibration" and value < (1 if name == "num_samples" else 2):
                raise ValueError(f"{name}={value} must be at least {1 if name == 'num_samples' else 2}")
        for name in ("desc_act", "static_groups", "damp_percent"):
            if self.method != "gptq" and getattr(self, name) not in (False, None):
                raise ValueError(f"{name}={getattr(self, name)!r} is of 'gptq', not of {self.method!r}; leave it out")
        if self.static_groups and self.desc_act is False:
            raise ValueError(
                "static_groups=True contradicts desc_act=False: without an order there is nothing to change"
            )
        if self.damp_percent is not None and not 0 < self.damp_percent < 1:
            raise ValueError(f"damp_percent={self.damp_percent!r} must be between 0 and 1, such as {DAMP}")
