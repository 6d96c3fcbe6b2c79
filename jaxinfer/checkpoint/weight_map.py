"""Which checkpoint tensor fills which part of which parameter: the family's table applied to one checkpoint.

Everything is checked from names and shapes alone, before any weight is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxinfer.checkpoint.tensor import Tensor
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.family import Family, LeafIndex, Weight

NameStyle = Literal["hf", "gguf"]


@dataclass(frozen=True)
class Placement:
    """One tensor's way into the parameter tree.

    Args:
        tensor: what to read.
        leaf: path of the parameter it (partly) fills.
        part: index that selects the part.
        pairwise_head_dim: head dimension, if the tensor's rows are rotary channels stored pairwise and must be put half
            a head apart; else 0.
    """

    tensor: Tensor
    leaf: str
    part: LeafIndex
    pairwise_head_dim: int = 0


def place_weights(
    family: Family, config: ModelConfig, tensors: Mapping[str, Tensor], style: NameStyle, source: Path
) -> tuple[Placement, ...]:
    """Finds for every parameter of the model the tensors that fill it.

    Raises:
        ValueError: a tensor is missing, unexpected, or of the wrong shape; the message names it, and both shapes.
    """
    if config.num_hidden_layers > len(tensors):  # also keeps a corrupt count from being counted to
        raise ValueError(
            f"{source}: {config.num_hidden_layers} layers, but the checkpoint has only {len(tensors)} tensors"
        )
    pairwise = style == "gguf" and family.gguf_pairwise_rotary
    placements, missing, misshapen = [], [], []
    for name, leaf, weight in expected_weights(family, config, style):
        shape, tensor = weight.tensor_shape(config), tensors.get(name)
        if tensor is None or not tensor.size:
            missing.append(f"{name} {list(shape)}")
        elif tensor.shape != shape:
            misshapen.append(f"{name} is {list(tensor.shape)} but the config says {list(shape)}")
        else:
            placements.append(
                Placement(tensor, leaf, weight.part, config.head_dim if pairwise and weight.rotary else 0)
            )
    if missing:
        raise ValueError(
            f"{source}: {_listed(missing)} missing from the checkpoint; it is incomplete or not a {family.name} model"
        )
    if misshapen:
        raise ValueError(f"{source}: tensor {_listed(misshapen)}")
    _refuse_unexpected(family, config, tensors, style, source)
    return tuple(placements)


def head_name(family: Family, style: NameStyle) -> str:
    """The checkpoint's name of the output head."""
    return next(getattr(weight, style) for weight in family.weights if weight.leaf == "lm_head/kernel")


def embedding_name(family: Family, style: NameStyle) -> str:
    """The checkpoint's name of the token embedding."""
    return next(getattr(weight, style) for weight in family.weights if weight.leaf == "embed/embedding")


def expected_weights(family: Family, config: ModelConfig, style: NameStyle) -> list[tuple[str, str, Weight]]:
    """Tensor name, leaf path and table line of every weight of the model."""
    expected = []
    for weight in family.weights:
        if weight.when(config):
            name = getattr(weight, style)
            layers = range(config.num_hidden_layers) if "{i}" in name else (0,)
            expected += [(name.format(i=i), weight.leaf.format(i=i), weight) for i in layers]
    return expected


def _refuse_unexpected(
    family: Family, config: ModelConfig, tensors: Mapping[str, Tensor], style: NameStyle, source: Path
) -> None:
    known = {name for name, _, _ in expected_weights(family, config, style)}
    if config.tie_word_embeddings:
        known.add(head_name(family, style))
    unexpected = [
        f"{name} {list(tensor.shape)}"
        for name, tensor in tensors.items()
        if name not in known and not name.endswith(family.ignored_weights)
    ]
    if unexpected:
        raise ValueError(
            f"{source}: tensor {_listed(unexpected)} has no place in the model that its config describes "
            f"({config.num_hidden_layers} layers, {family.name})"
        )


def _listed(items: list[str], most: int = 3) -> str:
    more = f" (and {len(items) - most} more)" if len(items) > most else ""
    return ", ".join(items[:most]) + more
