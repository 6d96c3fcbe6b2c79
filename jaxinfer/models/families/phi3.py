"""Phi-3 and Phi-4 (arXiv:2404.14219): Llama with its projections fused in the file, and longrope."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.base import BASE_KEYS, WINDOW_KEYS, base_fields
from jaxinfer.models.families.family import GATE, KEY, QUERY, UP, VALUE, Family, Weight
from jaxinfer.models.families.hf_config import windowed_layers, windows
from jaxinfer.models.families.weights import EMBEDDING, FINAL_NORM, HEAD, OUT, PRE_NORMS, linear

QKV = ("model.layers.{i}.self_attn.qkv_proj.weight", "blk.{i}.attn_qkv.weight", "layers_{i}/attn/qkv/kernel")
GATE_UP = ("model.layers.{i}.mlp.gate_up_proj.weight", "blk.{i}.ffn_up.weight", "layers_{i}/mlp/gate_up/kernel")


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Makes a ModelConfig from a Phi3Config's keys; what is missing takes Phi3Config's default.

    Raises:
        ValueError: a shape key is missing, or a setting is not supported.
    """
    for key in ("rope_scaling", "rope_parameters"):  # "yarn" was a name of longrope here
        settings = config.get(key)
        if isinstance(settings, Mapping) and "yarn" in (settings.get("type"), settings.get("rope_type")):
            config = {**config, key: {**settings, "rope_type": "longrope"}}
    layers = windowed_layers(config, lambda layer: config.get("sliding_window") is not None)
    return ModelConfig(**base_fields(config, max_positions=4096, eps=1e-5), **windows(config, layers))


PHI3 = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    model_config=model_config,
    config_keys=BASE_KEYS | WINDOW_KEYS | {"rms_norm_eps"},
    ignored_keys=frozenset({"attention_bias", "embd_pdrop", "resid_pdrop"}),
    weights=(
        EMBEDDING,
        *PRE_NORMS,
        Weight(*QKV, "NH D", QUERY, after=("KH", "KH")),
        Weight(*QKV, "KH D", KEY, before=("NH",), after=("KH",)),
        Weight(*QKV, "KH D", VALUE, before=("NH", "KH")),
        *OUT,
        Weight(*GATE_UP, "F D", GATE, after=("F",)),
        Weight(*GATE_UP, "F D", UP, before=("F",)),
        *linear("mlp.down_proj", "ffn_down", "mlp/down", "D F", lambda c: c.mlp_bias),
        *FINAL_NORM,
        HEAD,
    ),
    gguf_architectures=("phi3",),
)
