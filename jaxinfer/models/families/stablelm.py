"""StableLM 2 (arXiv:2402.17834): layer norms with biases, a quarter of each head rotated, perhaps a parallel block."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.base import BASE_KEYS, base_fields
from jaxinfer.models.families.family import Family, Weight
from jaxinfer.models.families.hf_config import flag
from jaxinfer.models.families.weights import ATTENTION, EMBEDDING, FINAL_NORM, HEAD, MLP, layer_norm


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Makes a ModelConfig from a StableLmConfig's keys; what is missing takes StableLmConfig's default.

    Raises:
        ValueError: a shape key is missing, or a setting is not supported.
    """
    return ModelConfig(
        **base_fields(config, max_positions=4096, partial=0.25, eps_key="layer_norm_eps", eps=1e-5),
        qkv_bias=flag(config, "use_qkv_bias", False),
        norm="layer",
        norm_bias=True,
        qk_norm="heads" if flag(config, "qk_layernorm", False) else None,
        block="parallel_shared_norm" if flag(config, "use_parallel_residual", False) else "sequential",
    )


def _head_norm(part: str, heads: str) -> Weight:
    """The norms of the heads, each a tensor of its own (in GGUF files one matrix)."""
    hf, leaf = (
        f"model.layers.{{i}}.self_attn.{part}_layernorm.norms.{{e}}.weight",
        f"layers_{{i}}/attn/{part}_norm/scale",
    )
    return Weight(hf, "", leaf, "H", each=heads, when=lambda c: c.qk_norm is not None)


STABLELM = Family(
    name="stablelm",
    architectures=("StableLmForCausalLM",),
    model_config=model_config,
    config_keys=BASE_KEYS | {"layer_norm_eps", "use_qkv_bias", "qk_layernorm", "use_parallel_residual"},
    weights=(
        EMBEDDING,
        *layer_norm("input_layernorm", "attn_norm", "attn_norm"),
        *layer_norm("post_attention_layernorm", "ffn_norm", "mlp_norm", lambda c: c.block == "sequential"),
        *ATTENTION,
        _head_norm("q", "N"),
        _head_norm("k", "K"),
        *MLP,
        *FINAL_NORM,
        HEAD,
    ),
)
