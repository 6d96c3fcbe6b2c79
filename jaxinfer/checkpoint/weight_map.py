"""Which checkpoint tensor fills which part of which parameter: the family's table applied to one checkpoint.

Everything is checked from names and shapes alone, before any weight is read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from jaxinfer.checkpoint.packed_module import PackedModule, find_packed, idle_biases, listed
from jaxinfer.checkpoint.tensor import Tensor
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.family import Family, LeafIndex, Weight
from jaxinfer.quant.layouts.layout import Layout

NameStyle = Literal["hf", "gguf"]


@dataclass(frozen=True)
class Slot:
    """The part of a parameter that a checkpoint's tensor, or some rows of it, fills.

    Args:
        leaf: path of the parameter.
        part: index that selects the part, of the leaf with its axes in the order of `axes`.
        shape: of those rows of the tensor.
        first_row: where they begin in the tensor.
        axes: permutation of the leaf's axes; empty for as they are.
        item: place of the tensor on the part's first axes, counted in C order; None when it fills the whole part.
        pairs: the head dimension and the values of one channel, if the tensor's rotary channels are stored pairwise and
            must be put half a head apart; else None.
        offset: added to every value of the tensor.
    """

    leaf: str
    part: LeafIndex
    shape: tuple[int, ...]
    first_row: int = 0
    axes: tuple[int, ...] = ()
    item: int | None = None
    pairs: tuple[int, int] | None = None
    offset: float = 0.0

    def view(self, leaf: np.ndarray) -> np.ndarray:
        """The part of the parameter's array."""
        view: np.ndarray = (leaf.transpose(self.axes) if self.axes else leaf)[self.part]
        if self.item is None:
            return view
        values = math.prod(self.shape)
        axes = next(axes for axes in range(view.ndim) if math.prod(view.shape[axes:]) == values)
        return view[np.unravel_index(self.item, view.shape[:axes])]

    def tensor_rows(self, leaf: np.ndarray) -> np.ndarray:
        """The rows of the tensor that fill this part of the parameter: `view` the other way round."""
        rows = self.view(leaf) - self.offset if self.offset else self.view(leaf)
        if self.pairs is None:
            return rows.reshape(self.shape)
        head_dim, channel_size = self.pairs
        return rows.reshape(-1, 2, head_dim // 2, channel_size).swapaxes(1, 2).reshape(self.shape)


@dataclass(frozen=True)
class Placement:
    """One tensor's way into the parameter tree: what to read, and where it goes."""

    tensor: Tensor | PackedModule
    slot: Slot

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return self.tensor.nbytes * self.slot.shape[0] // self.tensor.shape[0]


def place_weights(
    family: Family,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    style: NameStyle,
    source: Path,
    layout: Layout | None = None,
) -> tuple[Placement, ...]:
    """Finds for every parameter of the model the tensors that fill it.

    Args:
        family: the table of their names.
        config: of the model.
        tensors: the checkpoint's, by name.
        style: whose names these are.
        source: the checkpoint's path, for messages.
        layout: how the checkpoint keeps quantised matrices; None where it has none.

    Raises:
        ValueError: a tensor is missing, unexpected, or of the wrong shape; the message names it, and both shapes.
    """
    # This also keeps a corrupt count from being counted to.
    if config.num_hidden_layers > len(tensors) or (style == "hf" and config.num_experts > len(tensors)):
        raise ValueError(
            f"{source}: {config.num_hidden_layers} layers{_experts(config)}, but the checkpoint has only "
            f"{len(tensors)} tensors"
        )
    if _pairwise(family, style) and config.rotary_width != config.head_dim:
        raise ValueError(
            f"{source}: {config.rotary_width} of {config.head_dim} channels rotated, in pairs, is not supported"
        )
    placements, missing, misshapen = [], [], []
    expected = expected_weights(family, config, style)
    packed = {} if layout is None else find_packed(layout, _matrices(family, config, expected), tensors, source)
    parts = {f"{module.name}.{suffix}" for module in packed.values() for suffix in module.tensors}
    parts |= idle_biases(packed.values(), tensors) - {name for name, *_ in expected}
    unread = () if layout is None else layout.unread
    tensors = {name: tensor for name, tensor in tensors.items() if name not in parts and not name.endswith(unread)}
    for name, weight, slot in expected:
        if name in packed:
            placements.append(Placement(packed[name], slot))
            continue
        shape, tensor = weight.tensor_shape(config), tensors.get(name)
        if tensor is not None and style == "gguf" and shape[0] == 1 and tensor.shape == shape[1:]:
            tensor = replace(tensor, shape=shape, row_bytes=tensor.nbytes)  # the same to ggml
        if tensor is None or not tensor.size:
            missing.append(f"{name} {list(shape)}")
        elif tensor.shape != shape:
            misshapen.append(f"{name} is {list(tensor.shape)} but the config says {list(shape)}")
        else:
            placements.append(Placement(tensor, slot))
    if missing:
        there = _unexpected(family, config, tensors, style)
        raise ValueError(
            f"{source}: {listed(missing)} missing from the checkpoint; it is incomplete or not a {family.name} model"
            + (f". Nobody reads what is there: {listed(there)}" if there else "")
        )
    if misshapen:
        raise ValueError(f"{source}: tensor {listed(misshapen)}")
    _refuse_unexpected(family, config, tensors, style, source)
    return tuple(placements)


def _matrices(
    family: Family, config: ModelConfig, expected: Sequence[tuple[str, Weight, Slot]]
) -> dict[str, tuple[int, ...]]:
    """The shapes of the matrices that a checkpoint can have quantised, by name.

    Raises:
        ValueError: they are stored the other way round than linear layers.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, weight, slot in expected:
        shape = weight.tensor_shape(config)
        if not (slot.leaf.endswith("/kernel") and len(shape) == 2 and name.endswith(".weight")):
            continue
        if slot.axes and slot.axes[-1] != len(slot.axes) - 1:
            raise ValueError(f"quantised {family.name} checkpoints are not supported: their {name!r} is [in, out]")
        found[name] = shape
    return found


def complete_names(family: Family, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors under the names of the family's table, where the file leaves out the beginning."""
    prefix = family.optional_prefix
    if not prefix or any(name.startswith(prefix) for name in tensors):
        return tensors
    return {name if name == head_name(family, "hf") else prefix + name: tensor for name, tensor in tensors.items()}


def head_name(family: Family, style: NameStyle) -> str:
    """The checkpoint's name of the output head."""
    return next(getattr(weight, style) for weight in family.weights if weight.leaf == "lm_head/kernel")


def embedding_name(family: Family, style: NameStyle) -> str:
    """The checkpoint's name of the token embedding."""
    return next(getattr(weight, style) for weight in family.weights if weight.leaf == "embed/embedding")


def expected_weights(family: Family, config: ModelConfig, style: NameStyle) -> list[tuple[str, Weight, Slot]]:
    """Tensor name, table line and place of every weight of the model."""
    expected: list[tuple[str, Weight, Slot]] = []
    kinds = config.layer_kinds
    for weight in family.weights:
        name = getattr(weight, style)
        if not name or not weight.when(config):
            continue
        pairs = None
        if weight.rotary and _pairwise(family, style):
            pairs = config.head_dim, weight.channel_size(config)
        geometry = weight.part, weight.part_shape(config), weight.first_row(config), weight.axes
        # GGUF files have the 1 of such norms added to their weights.
        offset = -1.0 if style == "gguf" and config.norm_unit_offset and weight.leaf.endswith("/scale") else 0.0
        layers = [i for i, kind in enumerate(kinds) if weight.layers(kind)] if "{i}" in weight.leaf else [0]
        items: Sequence[int | None] = range(weight.items(config)) if weight.each else (None,)
        expected += [
            (name.format(i=i, e=item), weight, Slot(weight.leaf.format(i=i), *geometry, item, pairs, offset))
            for i in layers
            for item in items
        ]
    return expected


def _pairwise(family: Family, style: NameStyle) -> bool:
    return family.gguf_pairwise_rotary if style == "gguf" else family.pairwise_rotary


def _unexpected(family: Family, config: ModelConfig, tensors: Mapping[str, Tensor], style: NameStyle) -> list[str]:
    """Name and shape of tensors that have no place in the model."""
    known = {name for name, *_ in expected_weights(family, config, style)}
    if config.tie_word_embeddings:
        known.add(head_name(family, style))
    return [
        f"{name} {list(tensor.shape)}"
        for name, tensor in tensors.items()
        if name not in known and not name.endswith(family.ignored_weights)
    ]


def _refuse_unexpected(
    family: Family, config: ModelConfig, tensors: Mapping[str, Tensor], style: NameStyle, source: Path
) -> None:
    unexpected = _unexpected(family, config, tensors, style)
    if unexpected:
        raise ValueError(
            f"{source}: tensor {listed(unexpected)} has no place in the model that its config describes "
            f"({config.num_hidden_layers} layers, {family.name})"
        )


def _experts(config: ModelConfig) -> str:
    return f" of {config.num_experts} experts" if config.num_experts else ""
