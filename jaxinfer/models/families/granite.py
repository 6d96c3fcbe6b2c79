"""Granite 3 (dense): Llama with a factor on embedding, attention, residual stream and logits."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families import llama
from jaxinfer.models.families.base import base_fields
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.hf_config import number
from jaxinfer.models.families.weights import LLAMA_WEIGHTS

SCALES = {"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"}


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Makes a ModelConfig from a GraniteConfig's keys; what is missing takes GraniteConfig's default.

    Raises:
        ValueError: a shape key is missing, or a setting is not supported.
    """
    return ModelConfig(
        **base_fields(config),
        **llama.biases(config),
        query_scale=number(config, "attention_multiplier", 1.0),
        embedding_multiplier=number(config, "embedding_multiplier", 1.0),
        residual_multiplier=number(config, "residual_multiplier", 1.0),
        logit_multiplier=1 / number(config, "logits_scaling", 1.0),
    )


GRANITE = Family(
    name="granite",
    architectures=("GraniteForCausalLM",),
    model_config=model_config,
    config_keys=llama.CONFIG_KEYS | SCALES,
    weights=LLAMA_WEIGHTS,
    gguf_pairwise_rotary=True,
    gguf_architectures=("granite",),
)
