"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama with biases on the query, key and value projections."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.base import BASE_KEYS, WINDOW_KEYS, base_fields
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.hf_config import flag, size, windowed_layers, windows
from jaxinfer.models.families.weights import LLAMA_WEIGHTS

CONFIG_KEYS = BASE_KEYS | WINDOW_KEYS | {"rms_norm_eps", "use_sliding_window", "max_window_layers"}


def window_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Qwen's windows: the layers from ``max_window_layers`` on, if ``use_sliding_window``."""
    if not flag(config, "use_sliding_window", False):
        return {}
    config = {"sliding_window": 4096, **config}
    first = size(config, "max_window_layers", 28, minimum=0)
    layers = windowed_layers(config, lambda layer: config["sliding_window"] is not None and layer >= first)
    return windows(config, layers)


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Makes a ModelConfig from a Qwen2Config's keys; what is missing takes Qwen2Config's default.

    Raises:
        ValueError: a shape key is missing, or a setting is not supported.
    """
    windowed_layers(config, lambda layer: False)  # refuses types of layers that are unknown
    return ModelConfig(**base_fields(config, max_positions=32768), qkv_bias=True, **window_fields(config))


QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_config=model_config,
    config_keys=CONFIG_KEYS,
    weights=LLAMA_WEIGHTS,
    gguf_architectures=("qwen2",),
)
