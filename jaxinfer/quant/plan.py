"""Which parameters of a model are quantised, and how."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.quantize import dequantized, quantize, quantized_shape
from jaxinfer.quant.storage import FORMATS, ROTATION, CheckpointMethod, Kind, Method, Storage, fitting

# Output axes come first in a parameter: one in these, all but the last in the other matrices.
_ONE_OUTPUT_AXIS = ("attn/out/kernel", "mlp/down/kernel", "shared/down/kernel")
_MANY_OUTPUT_AXES = ("attn/qkv/kernel", "gate_up/kernel", "mlp/up/kernel")
DOWN_GROUP = 64
"""Of "int8" in the last matrix of a layer: SmolLM2 loses 0.3 % in perplexity instead of 1.1 %."""
_HEAD, _EMBEDDING = "lm_head/kernel", "embed/embedding"


@dataclass(frozen=True)
class QuantPlan:
    """How a model's matrices are stored. Norms, biases and routers always stay in floats.

    Attributes:
        method: what is asked for.
        group: inputs that share a scale in "int8" or a 4-bit format; 0 is all of a channel, None the method's own
            (`FORMATS`).
        down_group: of "int8" without a group: that of the matrices that come last in a layer, which lose most.
        symmetric: of "int4".
        double: whether "nf4" and "fp4" quantise their scales.
        head: whether an output head of its own is stored in 8 bits.
        embedding: whether the token table is stored in 8 bits; with tied weights it is the head, too.
        fast_form: whether matrices end up as int8 per output channel, made from the values that the method gives: what
            a CPU multiplies quickly. "int8" stays as it is, and "int8_w8a8" has its inputs rotated, too.
        kept: path -> format of the parameters whose codes are taken over from the checkpoint.
        floats: paths of parameters that stay in floats whatever the method.
        num_parts: devices that the inputs of a layer's last matrices are dealt out to: no block of inputs that are
            rotated together is cut.
        only_kept: whether the other parameters of layers stay in floats: the method is the checkpoint's.
    """

    method: Method | CheckpointMethod
    group: int | None = None
    symmetric: bool = True
    double: bool = False
    head: bool = False
    embedding: bool = False
    down_group: int = 0
    fast_form: bool = False
    kept: Mapping[str, Storage] = field(default_factory=dict)
    floats: frozenset[str] = frozenset()
    only_kept: bool = False
    num_parts: int = 1

    def source(self, path: str, shape: tuple[int, ...]) -> Storage | None:
        """The format that the method gives a parameter; None for floats."""
        if path in self.kept:
            return self.kept[path]
        axis = input_axis(path, shape)
        if axis is None or path in self.floats or not self._includes(path):
            return None
        wanted, row = FORMATS.get(self.method, Storage("int8")), int(np.prod(shape[axis:]))
        rotated = (
            self.method == "int8_w8a8" and self.fast_form and self._lying_together(path, shape, row) % ROTATION == 0
        )
        if path in (_HEAD, _EMBEDDING):
            kind: Kind = "fp8" if wanted.kind == "fp8" else "int8"
            return Storage(kind, act_bits=wanted.act_bits, rotated=rotated)
        if rotated:
            return replace(wanted, rotated=True)
        if self.method == "int8":
            wanted = replace(wanted, group=self.down_group if path.endswith("down/kernel") else 0)
        if self.group is not None:
            wanted = replace(wanted, group=self.group)
        if wanted.bits == 4:
            wanted = replace(wanted, symmetric=self.symmetric, double=self.double)
        return fitting(wanted, row, shape[-1])

    def stored(self, path: str, shape: tuple[int, ...]) -> Storage | None:
        """The format that a parameter ends up in; None for floats."""
        source = self.source(path, shape)
        if source is None or not self.fast_form or self.method in ("int8", "int8_w8a8"):
            return source
        return Storage("int8", act_bits=source.act_bits if source.kind == "int8" else 16)

    def shape_of(self, path: str, spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | QuantArray:
        """What becomes of a float parameter of this shape."""
        storage = self.stored(path, spec.shape)
        if storage is None:
            return spec
        return quantized_shape(spec.shape, _input_axis(path, spec.shape), storage, spec.dtype.name)

    def apply(self, path: str, values: np.ndarray | QuantArray, dtype: str) -> np.ndarray | QuantArray:
        """A parameter as it is stored: float parameters as they are, quantised ones as NumPy arrays.

        Args:
            path: of the parameter.
            values: floats of any dtype, or what the method makes of them already.
            dtype: name of the dtype that the parameter has in floats.

        Raises:
            ValueError: it is to be quantised and not finite; names it.
        """
        source, stored = self.source(path, values.shape), self.stored(path, values.shape)
        if source is None or stored is None:
            return values
        axis = _input_axis(path, values.shape)
        try:
            array = values if isinstance(values, QuantArray) else quantize(values, axis, source, dtype)
        except ValueError as error:
            raise ValueError(f"parameter {path!r} {error}") from error
        return array if source == stored else quantize(dequantized(array), axis, stored, dtype)

    def tree_shapes(self, shapes: Any) -> Any:
        """A tree of float parameters' shapes with the quantised ones in their place."""
        return jax.tree_util.tree_map_with_path(lambda path, spec: self.shape_of(path_name(path), spec), shapes)

    def _lying_together(self, path: str, shape: tuple[int, ...], row: int) -> int:
        """Inputs that no device's part cuts: the heads of a part, or all feed-forward channels, which are padded."""
        if self.num_parts == 1 or not path.endswith(_ONE_OUTPUT_AXIS):
            return row
        return row // self.num_parts if path.endswith(_ONE_OUTPUT_AXIS[0]) else shape[-1]

    def _includes(self, path: str) -> bool:
        return {_HEAD: self.head, _EMBEDDING: self.embedding}.get(path, not self.only_kept)


def path_name(path: tuple[Any, ...]) -> str:
    """ "layers_0/mlp/down/kernel" of a path that jax.tree_util gives."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def input_axis(path: str, shape: tuple[int, ...]) -> int | None:
    """The first input axis of a matrix that can be quantised; None for other parameters."""
    if path.endswith(_ONE_OUTPUT_AXIS) or path in (_HEAD, _EMBEDDING):
        return 1
    return len(shape) - 1 if path.endswith(_MANY_OUTPUT_AXES) else None


def _input_axis(path: str, shape: tuple[int, ...]) -> int:
    axis = input_axis(path, shape)
    assert axis is not None
    return axis
