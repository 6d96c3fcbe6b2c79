"""A layer's quantised matrices, seen with the experts apart."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.calibration.layer_result import CalibratedMethod
from jaxinfer.calibration.statistics import EXPERTS, InputStatistics, Statistics
from jaxinfer.models.config import LayerKind
from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.grid import Grid
from jaxinfer.quant.plan import input_axis
from jaxinfer.quant.quantize import pack_nibbles
from jaxinfer.quant.storage import Storage, fitting

FEW_TOKENS = 32
"""An expert that fewer go to has no statistics of its own."""
LARGEST = 32768.0
"""Magnitude of a weight whose scale float16 can hold."""


@dataclass(frozen=True)
class Matrix:
    """A quantised matrix of a layer, float32.

    Attributes:
        module: its name in the layer, e.g. "mlp/down".
        shape: of the parameter.
        experts: whether it holds all experts', along the second axis.
        bits, group, symmetric: of the format; a matrix that groups of at least 16 do not fit, or 4 bits, is int8 with a
            scale a channel.
    """

    module: str
    shape: tuple[int, ...]
    experts: bool
    bits: int
    group: int
    symmetric: bool

    @classmethod
    def of(cls, module: str, shape: tuple[int, ...], kind: LayerKind, method: CalibratedMethod) -> "Matrix":
        """The matrix of a module whose kernel has this shape."""
        experts = kind.moe and module in EXPERTS
        axis = input_axis(module + "/kernel", shape)
        assert axis is not None
        row = shape[-1] if experts else int(np.prod(shape[axis:]))
        wanted = Storage("int4" if method.bits == 4 else "int8", method.group, symmetric=method.symmetric)
        fits = fitting(wanted, row, shape[-1])
        if fits.bits != method.bits:
            return cls(module, shape, experts, fits.bits, row, symmetric=True)
        return cls(module, shape, experts, fits.bits, fits.group_of(row), method.symmetric)

    @property
    def axis(self) -> int:
        """The first input axis of the parameter."""
        axis = input_axis(self.module + "/kernel", self.shape)
        assert axis is not None
        return axis

    def parts(self, kernel: np.ndarray) -> np.ndarray:
        """``[E, N, K]``, an entry for each expert or one for all, of the parameter."""
        if self.experts:
            kernel = np.moveaxis(kernel, 1, 0)
            return kernel.reshape(len(kernel), -1, self.shape[-1])
        return kernel.reshape(1, int(np.prod(self.shape[: self.axis])), -1)

    def outputs(self, values: np.ndarray) -> np.ndarray:
        """``[E, N]`` of something for each output, in the parameter's output axes."""
        if self.experts and values.ndim > 1:
            values = np.moveaxis(values, 1, 0)
            return values.reshape(len(values), -1)
        return values.reshape(1, -1)

    def whole(self, parts: np.ndarray) -> np.ndarray:
        """The parameter's axes again, of ``[E, N, K]``, or of ``[E, N, K / group]`` with the inputs as one axis."""
        outputs = self.shape[: self.axis]
        if not self.experts:
            return parts.reshape(*outputs, -1)
        if len(outputs) == 1:  # experts are inputs
            return np.moveaxis(parts, 0, 1).reshape(*outputs, -1)
        return np.moveaxis(parts.reshape(len(parts), outputs[0], *outputs[2:], -1), 0, 1)

    def stored(self, codes: jax.Array, grid: Grid, order: np.ndarray | None, dtype: str) -> QuantArray:
        """The QuantArray of codes ``[E, N, K]`` on a grid ``[E, N, K / group]``.

        Args:
            codes: uint8.
            grid: of the groups.
            order: int32[E, K], for each expert, or [1, K] for all; None for inputs as they are.
            dtype: name of the parameter's dtype in floats.
        """
        whole = self.whole(np.asarray(codes)).reshape(self.shape)
        scale, zero = (self.whole(np.asarray(part, np.float32)) for part in grid)
        if self.bits == 8:
            whole, zero = (whole ^ 0x80).view(np.int8), zero - 128
        offset: np.ndarray | None = -zero * scale
        if self.symmetric:
            offset = offset.astype(np.float16) if offset is not None and self.bits == 4 else None
        return QuantArray(
            codes=pack_nibbles(whole) if self.bits == 4 else whole,
            scale=scale.astype(np.float16),
            offset=offset,
            codebook=None,
            bits=self.bits,
            group=self.group,
            axis=self.axis,
            shape=self.shape,
            dtype=dtype,
            order=None if order is None else (order + self.shape[-1] * np.arange(len(order))[:, None]).reshape(-1),
        )


def check_kernel(path: str, kernel: np.ndarray) -> None:
    """Raises ValueError if a value is NaN or too large for a float16 scale; names the parameter."""
    if not (np.abs(kernel) <= LARGEST).all():
        raise ValueError(
            f"parameter {path!r} holds NaN or a value beyond {LARGEST:g} and cannot be quantised; repair the checkpoint"
        )


def usable(module: str, statistics: Statistics) -> tuple[InputStatistics, tuple[int, ...]]:
    """Statistics with something in place of those of experts that fewer than `FEW_TOKENS` went to; which these are.

    What goes into such an expert is taken to be like what goes into all of them; what goes into the second of its
    matrices, which nobody has seen, to be inputs of one strength that have nothing to do with each other. Either way
    it weighs as much as one token.
    """
    found = statistics[module]
    tokens = np.asarray(found.tokens)
    few = tokens < FEW_TOKENS
    if len(few) == 1 or not few.any():
        return found, ()
    gram, magnitude = np.array(found.gram), np.array(found.magnitude)
    everyone = gram.sum(0) / max(tokens.sum(), 1)
    gram[few], magnitude[few] = everyone, magnitude.sum(0) / max(tokens.sum(), 1)
    if module == EXPERTS[1]:
        gram[few] = np.eye(len(everyone), dtype=np.float32) * max(np.diagonal(everyone).mean(), 1e-6)
        magnitude[few] = 0
    which = tuple(int(index) for index in np.flatnonzero(few))
    counted = np.where(few, np.float32(1), tokens)
    return InputStatistics(*map(jnp.asarray, (gram, magnitude, counted))), which


def kernels(params: Mapping[str, Any]) -> list[str]:
    """Modules of a layer whose kernels are quantised, in the order in which a token meets them."""
    order = ("attn/qkv", "attn/out", "mlp/gate_up", "mlp/up", "mlp/shared/gate_up", "mlp/down", "mlp/shared/down")
    return [module for module in order if f"{module}/kernel" in params]
