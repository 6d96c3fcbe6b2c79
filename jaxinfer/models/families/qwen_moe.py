"""Qwen2-MoE (with a shared expert behind a gate; arXiv:2407.10671) and Qwen3-MoE (without; arXiv:2505.09388)."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families import qwen2, qwen3
from jaxinfer.models.families.base import base_fields
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.hf_config import (
    flag,
    layer_count,
    optional,
    required_size,
    size,
    whole_numbers,
    windowed_layers,
    windows,
)
from jaxinfer.models.families.mixtral import ROUTER_KEYS
from jaxinfer.models.families.weights import LLAMA_WEIGHTS, experts, qk_norms, shared_expert

# fmt: off
MOE_KEYS = {
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "decoder_sparse_step", "mlp_only_layers",
}
# fmt: on


def _moe_fields(config: Mapping[str, Any], default_experts: int, per_token: int, width: int) -> dict[str, Any]:
    step, dense = size(config, "decoder_sparse_step", 1), whole_numbers(config, "mlp_only_layers") or ()
    count = layer_count(config)
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(count))
    return {
        "num_experts": size(config, "num_local_experts", size(config, "num_experts", default_experts)),
        "num_experts_per_tok": size(config, "num_experts_per_tok", per_token),
        "moe_intermediate_size": size(config, "moe_intermediate_size", width),
        "renormalize_experts": flag(config, "norm_topk_prob", False),
        "moe_layers": None if all(layers) else layers,
    }


def qwen2_moe_config(config: Mapping[str, Any]) -> ModelConfig:
    """Makes a ModelConfig from a Qwen2MoeConfig's keys; what is missing takes Qwen2MoeConfig's default.

    Raises:
        ValueError: a shape key is missing, or a setting is not supported.
    """
    config = {"sliding_window": 4096, **config}
    last = size(config, "max_window_layers", 28, minimum=0) if flag(config, "use_sliding_window", False) else 0
    layers = windowed_layers(config, lambda layer: layer % 2 == 0 and layer < last)
    return ModelConfig(
        **base_fields(config, max_positions=32768),
        **windows(config, layers),
        **_moe_fields(config, 60, 4, 1408),
        qkv_bias=flag(config, "qkv_bias", True),
        shared_expert_intermediate_size=size(config, "shared_expert_intermediate_size", 5632),
    )


def qwen3_moe_config(config: Mapping[str, Any]) -> ModelConfig:
    """Makes a ModelConfig from a Qwen3MoeConfig's keys; what is missing takes Qwen3MoeConfig's default.

    Raises:
        ValueError: a shape key is missing, or a setting is not supported.
    """
    # Unlike the dense ones, their head_dim is D / N by default, and their windows are in all layers.
    own_width = required_size(config, "hidden_size") // required_size(config, "num_attention_heads")
    full = {**config, "head_dim": optional(config, "head_dim", own_width), "max_window_layers": 0}
    return ModelConfig(**qwen3.fields(full), **_moe_fields(config, 128, 8, 768))


QWEN2_MOE = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    model_config=qwen2_moe_config,
    config_keys=qwen2.CONFIG_KEYS | MOE_KEYS | {"qkv_bias", "shared_expert_intermediate_size"},
    ignored_keys=ROUTER_KEYS,
    weights=(*LLAMA_WEIGHTS, *experts("mlp"), *shared_expert("mlp.shared_expert")),
    gguf_architectures=("qwen2moe",),
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    model_config=qwen3_moe_config,
    config_keys=qwen2.CONFIG_KEYS | MOE_KEYS | {"attention_bias"},
    ignored_keys=ROUTER_KEYS,
    weights=(*LLAMA_WEIGHTS, *qk_norms(), *experts("mlp")),
    gguf_architectures=("qwen3moe",),
    gguf_config=lambda config: {**config, "norm_topk_prob": True},  # which these files do not say
)
