"""Models that can be audited by name, or by their config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.registry import family_of_hf_config

MODELS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "llama-3-8b": ModelConfig(128256, 4096, 14336, 32, 32, 8, max_position_embeddings=8192, rope_theta=5e5),
        "llama-3-70b": ModelConfig(128256, 8192, 28672, 80, 64, 8, max_position_embeddings=8192, rope_theta=5e5),
        "qwen2.5-7b": ModelConfig(
            152064, 3584, 18944, 28, 28, 4, max_position_embeddings=32768, rope_theta=1e6, qkv_bias=True
        ),
        "qwen2.5-0.5b": ModelConfig(
            151936,
            896,
            4864,
            24,
            14,
            2,
            max_position_embeddings=32768,
            rope_theta=1e6,
            qkv_bias=True,
            tie_word_embeddings=True,
        ),
        "smollm2-135m": ModelConfig(
            49152, 576, 1536, 30, 9, 3, max_position_embeddings=8192, rope_theta=1e5, tie_word_embeddings=True
        ),
    }
)
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
    config = json.loads(path.read_text())
    return family_of_hf_config(config).model_config(config)
