"""GGUF metadata in Hugging Face's words, so that one family table serves both."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxinfer.checkpoint.tensor import Tensor
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.hf_config import naming, required_size, size
from jaxinfer.models.rope_scaling import RopeScaling

# Where two names are given for a key, the last that the family knows counts.
HF_KEYS = (
    ("block_count", "num_hidden_layers"),
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.sliding_window", "sliding_window"),
    ("attention.sliding_window_pattern", "sliding_window_pattern"),
    ("attention.scale", "attention_multiplier"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("embedding_scale", "embedding_multiplier"),
    ("residual_scale", "residual_multiplier"),
    ("logit_scale", "logits_scaling"),
    ("expert_count", "num_local_experts"),
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ("rope.freq_base", "rope_theta"),
    ("rope.freq_base_swa", "rope_local_base_freq"),
)
# What llama.cpp wants, too: a default in their place would be another model.
REQUIRED_SIZES = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
NORM_EPSILON = "attention.layer_norm_rms_epsilon"
ROPE_KEYS = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
CHECKED_KEYS = {"vocab_size", "rope.dimension_count", "attention.value_length", "rope.scaling.type", "expert_count"}
# About how the file was made, or of no consequence without experts.
IGNORED_KEYS = {"rope.scaling.finetuned", "expert_used_count", "tensor_data_layout", "attention.causal"}
SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
ROPE_FACTORS = "rope_freqs.weight"
# The settings of all released Llama 3.1, 3.2 and 3.3 models but for their factor, 8 or 32.
LLAMA3: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LONGROPE_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
NOT_PARAMETERS = {ROPE_FACTORS, *LONGROPE_FACTORS.values()}


def hf_config_of(
    family: Family, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], list[str]]:
    """Translates a file's architecture keys.

    Returns:
        A config with Hugging Face's keys, and the architecture keys that nobody reads.

    Raises:
        ValueError: a setting is missing or not supported (experts where the family has none, per-layer sizes).
    """
    prefix = f"{metadata['general.architecture']}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    listed = next((key for key, _ in HF_KEYS if isinstance(own.get(key), list)), None)
    if listed:
        raise ValueError(f"{prefix}{listed} differs from layer to layer, which is not supported")
    if own.get("expert_count") and not family.has_experts:
        raise ValueError(f"{prefix}expert_count={own['expert_count']}: mixture of experts is not supported")
    for key in REQUIRED_SIZES:
        required_size(metadata, prefix + key)
    if NORM_EPSILON not in own:
        raise ValueError(f"the file has no {prefix}{NORM_EPSILON}, the epsilon of its norms; convert it again")
    read = {key: name for key, name in HF_KEYS if name in family.config_keys}
    config = {read[key]: value for key, value in own.items() if key in read}
    embedding = tensors.get("token_embd.weight")
    config["vocab_size"] = own.get("vocab_size") if embedding is None else embedding.shape[0]
    if "sliding_window" in read.values():
        config["sliding_window"] = own.get("attention.sliding_window") or None  # Phi-4's files say 0 for none
    config |= _rope(family, own, tensors, prefix)
    unread = own.keys() - read.keys() - ROPE_KEYS.keys() - CHECKED_KEYS - IGNORED_KEYS
    with naming(_names(family, prefix)):
        config = family.gguf_config(config)
    return config, sorted(prefix + key for key in unread)


def _names(family: Family, prefix: str) -> dict[str, str]:
    """The file's keys by Hugging Face's names, and its tensor by our field."""
    names = {name: prefix + key for key, name in HF_KEYS if name in family.config_keys}
    names |= {f"rope_scaling.{name}": prefix + key for key, name in ROPE_KEYS.items()}
    return names | {"rope_freq_factors": ROPE_FACTORS}


def _rope(family: Family, own: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    kind = own.get("rope.scaling.type", "none")
    settings: dict[str, Any] = {"rope_type": kind}
    if kind != "none":
        settings |= {name: own[key] for key, name in ROPE_KEYS.items() if key in own}
    if all(name in tensors for name in LONGROPE_FACTORS.values()):
        names = ("attention_factor", "original_max_position_embeddings")
        settings = {name: own[key] for key, name in ROPE_KEYS.items() if name in names and key in own}
        settings |= {"rope_type": "longrope"}
        settings |= {key: _values(tensors[name]) for key, name in LONGROPE_FACTORS.items()}
    rotated = size(own, "rope.dimension_count", None, within=prefix)
    heads_width = own["embedding_length"] // own["attention.head_count"]
    width = size(own, "attention.key_length", heads_width, within=prefix)
    if ROPE_FACTORS in tensors and kind == "none":
        settings = _llama3(_values(tensors[ROPE_FACTORS]), own.get("rope.freq_base", 10000.0)) or settings
    config: dict[str, Any] = {"rope_scaling": settings}
    if rotated is not None and rotated != width:
        if family.gguf_pairwise_rotary or rotated > width:
            raise ValueError(
                f"{prefix}rope.dimension_count={rotated} is not supported; it must be the head_dim {width}"
            )
        config["partial_rotary_factor"] = rotated / width
    return config


def _llama3(divisors: list[float], theta: float) -> dict[str, Any] | None:
    """The scaling that the divisors were computed from (in float32), if it is Llama 3's: it says what they say, and a
    Hugging Face config can say it, too."""
    settings = {"factor": max(divisors, default=0.0), **LLAMA3}
    if settings["factor"] <= 1 or not theta > 0:
        return None
    scaling = RopeScaling("llama3", **settings)
    width = 2 * len(divisors)
    expected = theta ** -(np.arange(0, width, 2) / width) / scaling.frequencies(theta, width, 0)
    return {"rope_type": "llama3", **settings} if np.allclose(divisors, expected, rtol=1e-4, atol=0) else None


def _values(tensor: Tensor) -> list[float]:
    values = [float(value) for value in tensor.rows(0, tensor.shape[0]).astype(np.float32).ravel()]
    wrong = next((value for value in values if not 0 < value < math.inf), None)
    if wrong is not None:
        raise ValueError(f"tensor {tensor.name!r} has the value {wrong}; frequencies are divided by its values")
    return values


def model_config_of(
    family: Family, hf_config: Mapping[str, Any], metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> ModelConfig:
    """Makes the ModelConfig; biases, tying and rotary factors are told by which tensors there are.

    Raises:
        ValueError: heads of different widths, or a setting that the family refuses.
    """
    prefix = f"{metadata['general.architecture']}."
    with naming(_names(family, prefix)):
        config = replace(
            family.model_config(hf_config),
            qkv_bias="blk.0.attn_q.bias" in tensors,
            o_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_down.bias" in tensors,
            tie_word_embeddings="output.weight" not in tensors,
        )
        if ROPE_FACTORS in tensors and config.rope_scaling is None:
            config = replace(config, rope_freq_factors=tuple(_values(tensors[ROPE_FACTORS])))
    key = f"{prefix}attention.value_length"
    if metadata.get(key, config.head_dim) != config.head_dim:
        raise ValueError(f"{key}={metadata[key]} is not supported; it must be the head_dim {config.head_dim}")
    return config
