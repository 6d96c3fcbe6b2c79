"""Gemma (arXiv:2403.08295): scaled embeddings, norms of 1 + weight, a GeGLU; its head is always the embedding."""

import math
from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.base import BASE_KEYS, base_fields
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.hf_config import flag, optional, required_size, size
from jaxinfer.models.families.weights import LLAMA_WEIGHTS

CONFIG_KEYS = BASE_KEYS | {"rms_norm_eps", "attention_bias", "hidden_activation"}
IGNORED_KEYS = frozenset({"use_bidirectional_attention"})  # null or false in all text models


def fields(config: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """What all Gemmas have in common."""
    if flag(config, "use_bidirectional_attention", False):
        raise ValueError("use_bidirectional_attention=True is not supported; only causal attention is")
    bias = flag(config, "attention_bias", False)
    return base_fields(
        config, **{"max_positions": 8192, "head_dim": 256, "act": "gelu_pytorch_tanh", "tied": True, **defaults}
    ) | {
        "qkv_bias": bias,
        "o_bias": bias,
        "norm_unit_offset": True,
        "embedding_multiplier": math.sqrt(required_size(config, "hidden_size")),
    }


def gguf_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF files of Gemma 2 and 3 do not say how queries are scaled: by the head's width, but for the 27B models (46
    and 62 layers), where it is D / N."""
    if config.get("num_hidden_layers") in (46, 62):
        width = required_size(config, "hidden_size") // required_size(config, "num_attention_heads")
    else:
        width = size(config, "head_dim", 256)
    return {**config, "query_pre_attn_scalar": width}


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Makes a ModelConfig from a GemmaConfig's keys; what is missing takes GemmaConfig's default.

    Raises:
        ValueError: a shape key is missing, or a setting is not supported.
    """
    # The first configs said gelu and meant its approximation.
    says_gelu = optional(config, "hidden_act", "gelu") == "gelu"
    return ModelConfig(**fields(config, act_key="hidden_activation" if says_gelu else "hidden_act"))


GEMMA = Family(
    name="gemma",
    architectures=("GemmaForCausalLM",),
    model_config=model_config,
    config_keys=CONFIG_KEYS,
    ignored_keys=IGNORED_KEYS,
    weights=LLAMA_WEIGHTS,
    gguf_architectures=("gemma",),
)
