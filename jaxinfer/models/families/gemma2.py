"""Gemma 2 (arXiv:2408.00118): norms before and after, windows in every other layer, soft caps on all logits."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families import gemma
from jaxinfer.models.families.base import WINDOW_KEYS
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.hf_config import number, windowed_layers, windows
from jaxinfer.models.families.weights import ATTENTION, EMBEDDING, FINAL_NORM, HEAD, MLP, SANDWICH_NORMS

# fmt: off
CONFIG_KEYS = gemma.CONFIG_KEYS | WINDOW_KEYS | {
    "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
}
# fmt: on


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Makes a ModelConfig from a Gemma2Config's keys; what is missing takes Gemma2Config's default.

    Raises:
        ValueError: a shape key is missing, or a setting is not supported.
    """
    defaults = {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    config = {**defaults, **config}
    return ModelConfig(
        **gemma.fields(config, act_key="hidden_activation"),
        **windows(config, windowed_layers(config, lambda layer: layer % 2 == 0)),
        post_norms=True,
        query_scale=number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        attn_softcap=number(config, "attn_logit_softcapping", None),
        logit_softcap=number(config, "final_logit_softcapping", None),
    )


GEMMA2 = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    model_config=model_config,
    config_keys=CONFIG_KEYS,
    # Released configs still carry hidden_act beside hidden_activation, which is the one that counts.
    ignored_keys=gemma.IGNORED_KEYS,
    weights=(EMBEDDING, *SANDWICH_NORMS, *ATTENTION, *MLP, *FINAL_NORM, HEAD),
    gguf_config=gemma.gguf_config,
    gguf_architectures=("gemma2",),
)
