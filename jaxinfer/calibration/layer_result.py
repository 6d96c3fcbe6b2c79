"""What is asked of a quantisation with calibration, and what comes of each layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxinfer.quant.array import QuantArray

LayerParams = Mapping[str, np.ndarray]
"""A layer's parameters by their paths, e.g. "layers_3/attn/qkv/kernel"; floats of any dtype."""


@dataclass(frozen=True)
class CalibratedMethod:
    """AWQ (arXiv:2306.00978) or GPTQ (arXiv:2210.17323), with its settings.

    Attributes:
        name: "awq" or "gptq".
        bits: of a code: 4, or 8 with "gptq".
        group: inputs that share a scale; 0 is all of a channel. Halved until it divides a channel's inputs.
        symmetric: of "gptq": zero is the code in the middle, in every group. AWQ has a zero point in each.
        act_order: of "gptq": inputs are rounded in the order of how strong they are, and grouped in this order.
        static_groups: with `act_order`: groups are of neighbouring inputs all the same, with scales from the weights
            as they came.
        narrow: of "gptq": groups' ranges may be narrower than their weights, see `jaxinfer.quant.gptq.narrowed_grid`.
        damping: of "gptq": share of the mean of the Hessian's diagonal that is added to it.
        dtype: "float32", "bfloat16" or "float16", of parameters that stay floats and of `QuantArray.dtype`.

    Raises:
        ValueError: a field is out of range.
    """

    name: Literal["awq", "gptq"]
    bits: int = 4
    group: int = 128
    symmetric: bool = False
    act_order: bool = False
    static_groups: bool = False
    narrow: bool = True
    damping: float = 0.01
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.name not in ("awq", "gptq"):
            raise ValueError(f"name={self.name!r} must be 'awq' or 'gptq'")
        if self.bits not in ((4, 8) if self.name == "gptq" else (4,)):
            raise ValueError(f"bits={self.bits} is not supported: AWQ has 4 bits, GPTQ 4 or 8")
        if (self.group and self.group < 16) or self.group % 2:
            raise ValueError(f"group={self.group} must be an even number of at least 16, or 0 for all of a channel")
        if self.name == "awq" and (self.symmetric or self.act_order):
            raise ValueError("symmetric and act_order are settings of 'gptq'; AWQ has neither")
        if self.static_groups and not self.act_order:
            raise ValueError("static_groups=True needs act_order=True: without an order there is nothing to change")
        if not 0 < self.damping < 1:
            raise ValueError(f"damping={self.damping} must be between 0 and 1")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype={self.dtype!r} must be 'float32', 'bfloat16' or 'float16'")


@dataclass(frozen=True)
class MatrixReport:
    """What quantising did to a matrix's output on the calibration text.

    Errors are ``|x (W' - W)^T|^2 / |x W^T|^2`` over all its inputs x, all experts together.

    Attributes:
        path: of the parameter.
        rounded: the error of rounding to the nearest in the same format.
        scaled: of "awq": the error with scaled inputs, before clipping; `rounded` where nothing is scaled. Else None.
        error: of the result.
        foldable: of "awq": its inputs can be scaled, since what makes them can be divided.
        ratio: of "awq": the power of the mean activations that the scales are; 0 for none.
        uncalibrated: experts that too few tokens went to.
    """

    path: str
    rounded: float
    error: float
    scaled: float | None = None
    foldable: bool = False
    ratio: float = 0.0
    uncalibrated: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerResult:
    """A quantised layer.

    Attributes:
        index: of the layer, from 0.
        params: all of its parameters by their paths: quantised matrices as QuantArrays of NumPy arrays, the others in
            `CalibratedMethod.dtype`; with AWQ norms, biases and routers are other ones than before.
        reports: of each quantised matrix.
    """

    index: int
    params: Mapping[str, np.ndarray | QuantArray]
    reports: tuple[MatrixReport, ...]
