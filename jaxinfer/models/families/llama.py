"""Llama and the checkpoints that share its architecture, SmolLM2 among them (arXiv:2302.13971, arXiv:2307.09288)."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.base import BASE_KEYS, base_fields
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.hf_config import flag
from jaxinfer.models.families.weights import LLAMA_WEIGHTS

CONFIG_KEYS = BASE_KEYS | {"rms_norm_eps", "attention_bias", "mlp_bias"}


def biases(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``attention_bias`` and ``mlp_bias``, both false where they are missing."""
    bias = flag(config, "attention_bias", False)
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": flag(config, "mlp_bias", False)}


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Makes a ModelConfig from a LlamaConfig's keys; what is missing takes LlamaConfig's default.

    Raises:
        ValueError: a shape key is missing, or a setting is not supported.
    """
    return ModelConfig(**base_fields(config), **biases(config))


LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    model_config=model_config,
    config_keys=CONFIG_KEYS,
    weights=LLAMA_WEIGHTS,
    gguf_pairwise_rotary=True,
    gguf_architectures=("llama",),
)
