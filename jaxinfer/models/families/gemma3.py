"""Gemma 3, text (arXiv:2503.19786): Gemma 2 with norms on queries and keys in place of caps, and two rotary bases."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families import gemma, gemma2
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.hf_config import number, size, windowed_layers, windows
from jaxinfer.models.families.weights import qk_norms

GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4
# Released configs leave out what is at its default, sizes too.
DEFAULTS = {"sliding_window": 4096, "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Makes a ModelConfig from a Gemma3TextConfig's keys; what is missing takes Gemma3TextConfig's default.

    Raises:
        ValueError: a shape key is missing, or a setting is not supported.
    """
    config = DEFAULTS | dict(config)
    pattern = size(config, "sliding_window_pattern", size(config, "_sliding_window_pattern", 6))
    local_theta = number(config, "rope_local_base_freq", LOCAL_THETA)
    defaults: dict[str, Any] = {"max_positions": 131072, "theta": GLOBAL_THETA, "local_theta": local_theta}
    return ModelConfig(
        **gemma.fields(config, act_key="hidden_activation", **defaults),
        **windows(config, windowed_layers(config, lambda layer: (layer + 1) % pattern != 0)),
        post_norms=True,
        qk_norm="head",
        query_scale=number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        logit_softcap=number(config, "final_logit_softcapping", None),
    )


GEMMA3 = Family(
    name="gemma3_text",
    architectures=("Gemma3ForCausalLM",),
    model_config=model_config,
    config_keys=gemma2.CONFIG_KEYS | {"rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"},
    ignored_keys=gemma.IGNORED_KEYS,  # attn_logit_softcapping is read by nobody: transformers does not apply it either
    weights=(*gemma2.GEMMA2.weights, *qk_norms()),
    gguf_config=gemma.gguf_config,
    gguf_architectures=("gemma3",),
)
