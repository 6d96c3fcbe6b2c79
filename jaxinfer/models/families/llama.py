"""Llama and the checkpoints that share its architecture (arXiv:2302.13971, arXiv:2307.09288)."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.family import GATE, KEY, QUERY, UP, VALUE, Family, Weight
from jaxinfer.models.families.hf_config import (
    REFUSED_KEYS,
    ROPE_KEYS,
    activation,
    optional,
    refuse_unsupported,
    required_size,
    rope_theta,
)

# fmt: off
CONFIG_KEYS = ROPE_KEYS | REFUSED_KEYS | {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias",
    "tie_word_embeddings",
}
# fmt: on


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Makes a ModelConfig from a LlamaConfig's keys; what is missing takes LlamaConfig's default.

    Raises:
        ValueError: a shape key is missing, or a setting is not supported.
    """
    refuse_unsupported(config)
    bias = bool(optional(config, "attention_bias", False))
    return ModelConfig(
        vocab_size=required_size(config, "vocab_size"),
        hidden_size=required_size(config, "hidden_size"),
        intermediate_size=required_size(config, "intermediate_size"),
        num_hidden_layers=required_size(config, "num_hidden_layers"),
        num_attention_heads=required_size(config, "num_attention_heads"),
        num_key_value_heads=optional(config, "num_key_value_heads", 0),
        head_dim=optional(config, "head_dim", 0),
        max_position_embeddings=optional(config, "max_position_embeddings", 2048),
        rope_theta=rope_theta(config),
        rms_norm_eps=optional(config, "rms_norm_eps", 1e-6),
        hidden_act=activation(config, "silu"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(optional(config, "mlp_bias", False)),
        tie_word_embeddings=bool(optional(config, "tie_word_embeddings", False)),
    )


def _norm(hf: str, gguf: str, leaf: str) -> Weight:
    return Weight(f"model.layers.{{i}}.{hf}.weight", f"blk.{{i}}.{gguf}.weight", f"layers_{{i}}/{leaf}/scale", "D")


def _qkv(part: str, index: Any, heads: str, rotary: bool) -> tuple[Weight, Weight]:
    hf, gguf, leaf = f"model.layers.{{i}}.self_attn.{part}_proj", f"blk.{{i}}.attn_{part}", "layers_{i}/attn/qkv"
    return (
        Weight(f"{hf}.weight", f"{gguf}.weight", f"{leaf}/kernel", f"{heads}H D", index, rotary),
        Weight(f"{hf}.bias", f"{gguf}.bias", f"{leaf}/bias", f"{heads}H", index, rotary, lambda c: c.qkv_bias),
    )


def _linear(hf: str, gguf: str, leaf: str, shape: str, bias: str, index: Any = ()) -> tuple[Weight, Weight]:
    hf, gguf, leaf = f"model.layers.{{i}}.{hf}", f"blk.{{i}}.{gguf}", f"layers_{{i}}/{leaf}"
    return (
        Weight(f"{hf}.weight", f"{gguf}.weight", f"{leaf}/kernel", shape, index),
        Weight(f"{hf}.bias", f"{gguf}.bias", f"{leaf}/bias", shape.split()[0], index, when=lambda c: getattr(c, bias)),
    )


WEIGHTS = (
    Weight("model.embed_tokens.weight", "token_embd.weight", "embed/embedding", "V D"),
    _norm("input_layernorm", "attn_norm", "attn_norm"),
    *_qkv("q", QUERY, "N", rotary=True),
    *_qkv("k", KEY, "K", rotary=True),
    *_qkv("v", VALUE, "K", rotary=False),
    *_linear("self_attn.o_proj", "attn_output", "attn/out", "D NH", "o_bias"),
    _norm("post_attention_layernorm", "ffn_norm", "mlp_norm"),
    *_linear("mlp.gate_proj", "ffn_gate", "mlp/gate_up", "F D", "mlp_bias", GATE),
    *_linear("mlp.up_proj", "ffn_up", "mlp/gate_up", "F D", "mlp_bias", UP),
    *_linear("mlp.down_proj", "ffn_down", "mlp/down", "D F", "mlp_bias"),
    Weight("model.norm.weight", "output_norm.weight", "final_norm/scale", "D"),
    Weight("lm_head.weight", "output.weight", "lm_head/kernel", "V D", when=lambda c: not c.tie_word_embeddings),
)

LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    model_config=model_config,
    config_keys=CONFIG_KEYS,
    weights=WEIGHTS,
    gguf_pairwise_rotary=True,
)
