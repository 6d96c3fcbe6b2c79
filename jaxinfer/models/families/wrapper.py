"""Models that see, wrapped around a text model of a family of ours: only that is taken.

Their config.json keeps the text model's settings in ``text_config``; their tensors have ``language_model`` in front.
"""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.families.family import COMMON_IGNORED_KEYS

WRAPPERS = ("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration")
# What the wrapper says of the whole model, and so of the text model too: its word counts.
_SHARED_KEYS = {"eos_token_id", "bos_token_id", "pad_token_id", "dtype", "torch_dtype", "quantization_config"}
_SHARED_KEYS |= {"tie_word_embeddings"}
# As released, and as transformers names them in memory.
_PREFIXES = {"language_model.": "", "model.language_model.": "model."}


def wrapper_of(config: Mapping[str, Any]) -> str | None:
    """The wrapper's class name if a Hugging Face config is of one that is supported."""
    names = config.get("architectures")
    if not isinstance(names, list):
        return None
    return next((name for name in names if name in WRAPPERS), None)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's own config, which names no architecture but a ``model_type``; other configs as they are.

    Raises:
        ValueError: a wrapper without a text model.
    """
    wrapper = wrapper_of(config)
    if wrapper is None:
        return dict(config)
    text = config.get("text_config")
    if not isinstance(text, Mapping) or not text.get("model_type"):
        raise ValueError(f"{wrapper} needs a text_config with its model_type, not {text!r}")
    shared = {key: value for key, value in config.items() if key in _SHARED_KEYS and value is not None}
    return {**text, **shared, "architectures": None}


def unread_keys(config: Mapping[str, Any]) -> list[str]:
    """Settings of a wrapper that are not the text model's."""
    return sorted(set(config) - _SHARED_KEYS - COMMON_IGNORED_KEYS - {"text_config"})


def text_name(name: str) -> str | None:
    """A wrapper's tensor by the text model's name; None for one of another part."""
    if name.startswith("lm_head."):
        return name
    return next((new + name.removeprefix(old) for old, new in _PREFIXES.items() if name.startswith(old)), None)


def part_of(name: str) -> str:
    """The part of a wrapper that a tensor belongs to, e.g. "vision_tower"."""
    return name.removeprefix("model.").partition(".")[0]
