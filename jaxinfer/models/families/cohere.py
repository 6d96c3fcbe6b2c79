"""Cohere's Command R and R7B: attention and MLP side by side behind one layer norm, channels rotated in pairs."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.base import BASE_KEYS, WINDOW_KEYS, base_fields
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.hf_config import flag, number, size, windowed_layers, windows
from jaxinfer.models.families.weights import ATTENTION, EMBEDDING, FINAL_NORM, HEAD, MLP, layer_norm, qk_norms

CONFIG_KEYS = BASE_KEYS | {"layer_norm_eps", "attention_bias", "logit_scale"}
WEIGHTS = (
    EMBEDDING,
    *layer_norm("input_layernorm", "attn_norm", "attn_norm"),
    *ATTENTION,
    *qk_norms("N H", "K H", rotary=True),
    *MLP,
    *FINAL_NORM,
    HEAD,
)


def _fields(config: Mapping[str, Any], theta: float) -> dict[str, Any]:
    bias = flag(config, "attention_bias", False)
    return base_fields(config, max_positions=8192, theta=theta, eps_key="layer_norm_eps", eps=1e-5, tied=True) | {
        "qkv_bias": bias,
        "o_bias": bias,
        "norm": "layer",
        "block": "parallel_shared_norm",
        "logit_multiplier": number(config, "logit_scale", 0.0625),
    }


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Makes a ModelConfig from a CohereConfig's keys; what is missing takes CohereConfig's default.

    Raises:
        ValueError: a shape key is missing, or a setting is not supported.
    """
    return ModelConfig(**_fields(config, 5e5), qk_norm="heads" if flag(config, "use_qk_norm", False) else None)


def model_config_of_two(config: Mapping[str, Any]) -> ModelConfig:
    """The same for a Cohere2Config: three windowed layers that rotate, then one that sees all and does not.

    Raises:
        ValueError: a shape key is missing, or a setting is not supported.
    """
    config = {"sliding_window": 4096, **config}
    pattern = size(config, "sliding_window_pattern", 4)
    layers = windowed_layers(config, lambda layer: (layer + 1) % pattern != 0)
    return ModelConfig(**_fields(config, 1e4), **windows(config, layers), rope_layers=layers)


COHERE = Family(
    name="cohere",
    architectures=("CohereForCausalLM",),
    model_config=model_config,
    config_keys=CONFIG_KEYS | {"use_qk_norm"},
    weights=WEIGHTS,
    pairwise_rotary=True,
)
COHERE2 = Family(
    name="cohere2",
    architectures=("Cohere2ForCausalLM",),
    model_config=model_config_of_two,
    config_keys=CONFIG_KEYS | WINDOW_KEYS | {"sliding_window_pattern"},
    # Descriptions of the pattern, which layer_types or sliding_window_pattern say already.
    ignored_keys=frozenset({"order_of_interleaved_layers", "position_embedding_type", "rotary_pct"}),
    weights=WEIGHTS,
    pairwise_rotary=True,
)
