"""Qwen3 (arXiv:2505.09388): Llama with a norm on each head's queries and keys."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families import llama, qwen2
from jaxinfer.models.families.base import base_fields
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.weights import LLAMA_WEIGHTS, qk_norms


def fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """What Qwen3 and its mixture of experts have in common."""
    base = base_fields(config, max_positions=32768, head_dim=128)
    return base | llama.biases(config) | {"qk_norm": "head", "mlp_bias": False} | qwen2.window_fields(config)


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Makes a ModelConfig from a Qwen3Config's keys; what is missing takes Qwen3Config's default.

    Raises:
        ValueError: a shape key is missing, or a setting is not supported.
    """
    return ModelConfig(**fields(config))


QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    model_config=model_config,
    config_keys=qwen2.CONFIG_KEYS | {"attention_bias"},
    weights=(*LLAMA_WEIGHTS, *qk_norms()),
    gguf_architectures=("qwen3",),
)
