"""Mistral (arXiv:2310.06825): Llama with a sliding window in every layer, or in none."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.base import BASE_KEYS, WINDOW_KEYS, base_fields
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.hf_config import windowed_layers, windows
from jaxinfer.models.families.weights import LLAMA_WEIGHTS


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Makes a ModelConfig from a MistralConfig's keys; what is missing takes MistralConfig's default, a window of 4096.

    Raises:
        ValueError: a shape key is missing, or a setting is not supported.
    """
    config = {"sliding_window": 4096, **config}
    layers = windowed_layers(config, lambda layer: config["sliding_window"] is not None)
    return ModelConfig(**base_fields(config, max_positions=131072), **windows(config, layers))


MISTRAL = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    model_config=model_config,
    config_keys=BASE_KEYS | WINDOW_KEYS | {"rms_norm_eps"},
    weights=LLAMA_WEIGHTS,
)
