"""GGUF metadata in Hugging Face's words, so that one family table serves both."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxinfer.checkpoint.tensor import Tensor
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.family import Family

HF_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
CHECKED_KEYS = {"vocab_size", "rope.dimension_count", "attention.value_length", "rope.scaling.type", "expert_count"}
# Either redundant (the rope scaling's own numbers, refused or absent with it) or about how the file was made.
IGNORED_KEYS = {
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "expert_used_count",
    "tensor_data_layout",
    "attention.causal",
}
SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
ROPE_FACTORS = "rope_freqs.weight"


def hf_config_of(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], list[str]]:
    """Translates a file's architecture keys.

    Returns:
        A config with Hugging Face's keys, and the architecture keys that nobody reads.

    Raises:
        ValueError: a setting is not supported (mixture of experts, scaled or partial rotation, per-layer sizes).
    """
    prefix = f"{metadata['general.architecture']}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    listed = next((key for key in HF_KEYS if isinstance(own.get(key), list)), None)
    if listed:
        raise ValueError(f"{prefix}{listed} differs from layer to layer, which is not supported")
    if own.get("expert_count"):
        raise ValueError(f"{prefix}expert_count={own['expert_count']}: mixture of experts is not supported")
    config = {HF_KEYS[key]: value for key, value in own.items() if key in HF_KEYS}
    embedding = tensors.get("token_embd.weight")
    config["vocab_size"] = own.get("vocab_size") if embedding is None else embedding.shape[0]
    config["rope_scaling"] = {"rope_type": own.get("rope.scaling.type", "none")}
    return config, sorted(prefix + key for key in own if key not in HF_KEYS.keys() | CHECKED_KEYS | IGNORED_KEYS)


def model_config_of(
    family: Family, hf_config: Mapping[str, Any], metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> ModelConfig:
    """Makes the ModelConfig; biases, tying and rotary factors are told by which tensors there are.

    Raises:
        ValueError: heads of different widths, or rotation of a part of the head.
    """
    config = replace(
        family.model_config(hf_config),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        tie_word_embeddings="output.weight" not in tensors,
    )
    for key in ("rope.dimension_count", "attention.value_length"):
        value = metadata.get(f"{family.name}.{key}", config.head_dim)
        if value != config.head_dim:
            raise ValueError(f"{family.name}.{key}={value} is not supported; it must be the head_dim {config.head_dim}")
    if ROPE_FACTORS in tensors:
        factors = tensors[ROPE_FACTORS]
        values = factors.rows(0, factors.size).astype(np.float32).ravel()
        config = replace(config, rope_freq_factors=tuple(float(value) for value in values))
    return config
