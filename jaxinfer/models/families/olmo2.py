"""OLMo 2 (arXiv:2501.00656): norms after attention and MLP, and over all queries and all keys."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families import llama
from jaxinfer.models.families.base import BASE_KEYS, base_fields
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.weights import ATTENTION, EMBEDDING, FINAL_NORM, HEAD, MLP, layer_norm, qk_norms


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Makes a ModelConfig from an Olmo2Config's keys; what is missing takes Olmo2Config's default.

    Raises:
        ValueError: a shape key is missing, or a setting is not supported.
    """
    fields: dict[str, Any] = {"pre_norms": False, "post_norms": True, "qk_norm": "full"}
    return ModelConfig(**base_fields(config, eps=1e-5), **llama.biases(config) | {"mlp_bias": False}, **fields)


OLMO2 = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM",),
    model_config=model_config,
    config_keys=BASE_KEYS | {"rms_norm_eps", "attention_bias"},
    weights=(
        EMBEDDING,
        *ATTENTION,
        *qk_norms("NH", "KH"),
        *layer_norm("post_attention_layernorm", "post_attention_norm", "attn_post_norm"),
        *MLP,
        *layer_norm("post_feedforward_layernorm", "post_ffw_norm", "mlp_post_norm"),
        *FINAL_NORM,
        HEAD,
    ),
)
