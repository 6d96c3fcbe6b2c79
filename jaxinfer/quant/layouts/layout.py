"""What all layouts of quantised checkpoints have in common."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from jaxinfer.quant.storage import Storage

if TYPE_CHECKING:
    from jaxinfer.quant.array import QuantArray

FLOATS = ("float16", "bfloat16", "float32")


class TensorSpec(NamedTuple):
    """What a tensor of a module has to be.

    Attributes:
        shape: its axes.
        dtype: name of its dtype, or several.
        required: whether the checkpoint must have it.
    """

    shape: tuple[int, ...]
    dtype: str | tuple[str, ...]
    required: bool = True


class Layout(Protocol):
    """How one checkpoint keeps the weights of its quantised modules; a module is a linear layer ``[N, K]`` by its name
    in the checkpoint, such as "model.layers.0.self_attn.q_proj", its tensors are told apart by what follows the name:
    a suffix such as "qweight". A layout reads no file and imports NumPy only. Implementations are frozen dataclasses.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Layout":
        """Reads a checkpoint's ``quantization_config``.

        Raises:
            ValueError: a key has a value that is not supported; names key, value and remedy.
        """

    def config(self) -> dict[str, Any]:
        """The ``quantization_config`` to write: the inverse of `from_config`."""

    @property
    def method(self) -> str:
        """Its ``quant_method``."""

    @property
    def names(self) -> tuple[str, ...]:
        """Values of the engine's argument `quantization` that agree with it."""

    def __str__(self) -> str:
        """In words, e.g. "awq, 4 bits in groups of 128"."""

    def covers(self, module: str) -> bool:
        """Whether a linear layer of that name is quantised, as far as the config says. (One of which the file has the
        float weight and nothing else is not, and one without a float ``weight`` is.)"""

    def of(self, module: str, tensors: Mapping[str, TensorSpec]) -> "Layout":
        """The layout of one module: what `shapes`, `storage`, `unpack` and `pack` are asked of. Most are the same for
        all modules and return themselves; compressed-tensors has groups of modules, and bitsandbytes tells a module's
        block size and scale dtypes by its tensors only.

        Args:
            module: its name.
            tensors: what the checkpoint has of it, by suffix.

        Raises:
            ValueError: these are impossible; begins with a suffix.
        """

    def shapes(self, channels: int, row: int) -> Mapping[str, TensorSpec]:
        """The tensors of a module, by suffix.

        Raises:
            ValueError: the layout cannot hold a matrix of these sizes; names the size and what it must be.
        """

    @property
    def ordering(self) -> str:
        """Suffix of the tensor that says in which order `unpack` stores a module's inputs; "" for never. Modules whose
        `storage` is ordered and that have the same values there have the same order."""

    @property
    def unread(self) -> tuple[str, ...]:
        """Endings of names of tensors that are no part of a module's matrix and are not needed: scales of KV caches."""

    def storage(self, row: int, dtypes: Mapping[str, str]) -> Storage:
        """The format of what `unpack` makes of a module: exactly that of its arrays.

        Args:
            row: its inputs.
            dtypes: the dtype of each of its tensors that the checkpoint has, by suffix.

        Raises:
            ValueError: what is there does not go together.
        """

    def unpack(self, tensors: Mapping[str, np.ndarray], channels: int, row: int) -> "QuantArray":
        """A module's matrix.

        Args:
            tensors: those that the checkpoint has, by suffix, of the shapes and dtypes of `shapes`; read-only.
            channels: N, a module's outputs.
            row: K, its inputs.

        Returns:
            A QuantArray of NumPy arrays with the shape ``(N, K)`` and axis 1.

        Raises:
            ValueError: what a tensor holds is impossible; begins with its suffix.
        """

    def pack(self, array: "QuantArray") -> dict[str, np.ndarray]:
        """The tensors of a module, by suffix: the inverse of `unpack`.

        Args:
            array: of NumPy arrays; its outputs are one axis.

        Raises:
            ValueError: the layout cannot hold it.
        """


def keep(config: Mapping[str, Any], allowed: Mapping[str, Sequence[Any]], method: str) -> None:
    """Refuses settings that change what the tensors mean.

    Args:
        config: a ``quantization_config``.
        allowed: key -> the values that are supported; a key that is missing is fine.
        method: its ``quant_method``.

    Raises:
        ValueError: a value is none of these; names every such key.
    """
    wrong = [
        f"{key}={config[key]!r} (supported: {', '.join(map(repr, values))})"
        for key, values in allowed.items()
        if key in config and not any(type(config[key]) is type(value) and config[key] == value for value in values)
    ]
    if wrong:
        raise ValueError(
            f"quantization_config of {method} is not supported: {'; '.join(wrong)}. Use a checkpoint without, or the "
            "unquantised one and have it quantised while it is read (quantization='int4', for example)"
        )
