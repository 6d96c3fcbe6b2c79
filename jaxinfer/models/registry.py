"""From the architecture a checkpoint names to the family table that loads it."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.models.families.family import Family
from jaxinfer.models.families.llama import LLAMA
from jaxinfer.models.families.qwen2 import QWEN2

FAMILIES: tuple[Family, ...] = (LLAMA, QWEN2)


def supported_architectures() -> tuple[str, ...]:
    """The names config.json's ``architectures`` may carry."""
    return tuple(name for family in FAMILIES for name in family.architectures)


def family_of_hf_config(config: Mapping[str, Any]) -> Family:
    """Finds the family of a Hugging Face config by ``architectures``, or by ``model_type`` when that is absent.

    Raises:
        ValueError: no family loads it; the message lists the supported architectures.
    """
    names = config.get("architectures") or ()
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ValueError(f"architectures={names!r} must be a list of class names")
    for family in FAMILIES:
        if any(name in family.architectures for name in names):
            return family
        if not names and config.get("model_type") == family.name:
            return family
    given = f"architectures={list(names)}" if names else f"model_type={config.get('model_type')!r}"
    raise ValueError(f"{given} is not supported; supported architectures: {', '.join(supported_architectures())}")


def family_of_gguf(architecture: str) -> Family:
    """Finds the family of a GGUF file by its ``general.architecture``.

    Raises:
        ValueError: no family loads it; the message lists the supported architectures.
    """
    for family in FAMILIES:
        if family.name == architecture:
            return family
    supported = ", ".join(family.name for family in FAMILIES)
    raise ValueError(f"GGUF architecture {architecture!r} is not supported; supported architectures: {supported}")
