"""Mixtral (arXiv:2401.04088): Mistral with experts in place of the MLP, their weights adding up to 1."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.base import BASE_KEYS, WINDOW_KEYS, base_fields
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.hf_config import size, windowed_layers, windows
from jaxinfer.models.families.weights import ATTENTION, EMBEDDING, FINAL_NORM, HEAD, PRE_NORMS, experts

ROUTER_KEYS = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})  # of training


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Makes a ModelConfig from a MixtralConfig's keys; what is missing takes MixtralConfig's default.

    Raises:
        ValueError: a shape key is missing, or a setting is not supported.
    """
    layers = windowed_layers(config, lambda layer: config.get("sliding_window") is not None)
    base = base_fields(config, max_positions=131072, theta=1e6, eps=1e-5)
    return ModelConfig(
        **base,
        **windows(config, layers),
        num_experts=size(config, "num_local_experts", 8),
        num_experts_per_tok=size(config, "num_experts_per_tok", 2),
        moe_intermediate_size=base["intermediate_size"],
    )


MIXTRAL = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    model_config=model_config,
    config_keys=BASE_KEYS | WINDOW_KEYS | {"rms_norm_eps", "num_local_experts", "num_experts_per_tok"},
    ignored_keys=ROUTER_KEYS,
    weights=(
        EMBEDDING,
        *PRE_NORMS,
        *ATTENTION,
        *experts("block_sparse_moe", ("w1", "w3", "w2")),
        *FINAL_NORM,
        HEAD,
    ),
    gguf_pairwise_rotary=True,
    gguf_architectures=("llama",),
)
