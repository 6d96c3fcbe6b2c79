"""Models that can be audited by name, or by their config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.wrapper import text_config
from jaxinfer.models.registry import family_of_hf_config
from jaxinfer.planning.presets import PRESETS

NAMES = ("llama-3-8b", "llama-3-70b", "qwen2.5-7b", "qwen2.5-0.5b", "smollm2-135m")
MODELS: Mapping[str, ModelConfig] = MappingProxyType({name: PRESETS[name] for name in NAMES})
"""The sizes of public models, from their config.json."""


def model_named(name: str) -> ModelConfig:
    """One of `MODELS`, or what the config.json at or in the path `name` describes.

    Raises:
        ValueError: neither; or a config that is not supported.
    """
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"--model {name} is neither a file nor one of {', '.join(MODELS)}")
    config = text_config(json.loads(path.read_text()))
    return family_of_hf_config(config).model_config(config)
