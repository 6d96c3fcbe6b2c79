"""GGUF files of the tiny family checkpoints: names by the gguf package, values as llama.cpp's converter has them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Tensors = Mapping[str, np.ndarray]
KEYS = gguf.Keys
PERMUTED = ("llama", "granite")  # architectures whose rotary channels lie in pairs
NO_WINDOW = {"sliding_window": None, "layer_types": ...}
# Case -> architecture, and what its GGUF file cannot say otherwise than so (`...`: not at all).
TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_llama3": ("llama", {}),
    "mixtral": ("llama", {}),
    "qwen2": ("qwen2", {"use_sliding_window": False, **NO_WINDOW}),
    "qwen3": ("qwen3", {"use_sliding_window": False, **NO_WINDOW}),
    "qwen2_moe_all": ("qwen2moe", {"use_sliding_window": False, **NO_WINDOW}),
    "qwen3_moe_unnormalised": ("qwen3moe", {"norm_topk_prob": True}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 16}),
    "phi3": ("phi3", NO_WINDOW),  # llama.cpp takes no notice of this architecture's windows
    "phi3_longrope": ("phi3", {}),
    "granite": ("granite", {}),
}


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config with other settings; `...` leaves one out."""
    merged = {**config, **changes}
    return {key: value for key, value in merged.items() if value is not ...}


def own_fields(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """The architecture's metadata, by the keys of the gguf package."""
    rope = config["rope_parameters"]
    full, local = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    heads, head_dim = config["num_attention_heads"], config.get("head_dim")
    width = head_dim or config["hidden_size"] // heads
    partial = full.get("partial_rotary_factor", 1.0)
    scaled = full["rope_type"] == "linear"
    values = {
        KEYS.LLM.BLOCK_COUNT: config["num_hidden_layers"],
        KEYS.LLM.CONTEXT_LENGTH: config["max_position_embeddings"],
        KEYS.LLM.EMBEDDING_LENGTH: config["hidden_size"],
        KEYS.LLM.VOCAB_SIZE: config["vocab_size"],
        KEYS.LLM.FEED_FORWARD_LENGTH: config["intermediate_size"],
        KEYS.Attention.HEAD_COUNT: heads,
        KEYS.Attention.HEAD_COUNT_KV: config["num_key_value_heads"],
        KEYS.Attention.KEY_LENGTH: head_dim,
        KEYS.Attention.VALUE_LENGTH: head_dim,
        KEYS.Attention.LAYERNORM_RMS_EPS: float(config["rms_norm_eps"]),
        KEYS.Attention.SLIDING_WINDOW: config.get("sliding_window"),
        "{arch}.attention.sliding_window_pattern": 3 if arch == "gemma3" else None,
        KEYS.Attention.SCALE: config.get("attention_multiplier"),
        KEYS.LLM.ATTN_LOGIT_SOFTCAPPING: config.get("attn_logit_softcapping"),
        KEYS.LLM.FINAL_LOGIT_SOFTCAPPING: config.get("final_logit_softcapping"),
        KEYS.LLM.EMBEDDING_SCALE: config.get("embedding_multiplier"),
        KEYS.LLM.RESIDUAL_SCALE: config.get("residual_multiplier"),
        KEYS.LLM.LOGIT_SCALE: config.get("logits_scaling"),
        KEYS.LLM.EXPERT_COUNT: config.get("num_local_experts", config.get("num_experts")),
        KEYS.LLM.EXPERT_USED_COUNT: config.get("num_experts_per_tok"),
        KEYS.LLM.EXPERT_FEED_FORWARD_LENGTH: config.get("moe_intermediate_size"),
        KEYS.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: config.get("shared_expert_intermediate_size"),
        KEYS.Rope.FREQ_BASE: float(full["rope_theta"]),
        "{arch}.rope.freq_base_swa": local.get("rope_theta"),
        KEYS.Rope.DIMENSION_COUNT: int(width * partial),
        KEYS.Rope.SCALING_TYPE: "linear" if scaled else None,
        KEYS.Rope.SCALING_FACTOR: full["factor"] if scaled else None,
        KEYS.Rope.SCALING_ORIG_CTX_LEN: full.get("original_max_position_embeddings"),
        KEYS.Rope.SCALING_ATTN_FACTOR: _longrope_attention(full, config) if full["rope_type"] == "longrope" else None,
    }
    return {key.format(arch=arch): value for key, value in values.items() if value is not None}


def _longrope_attention(rope: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    original = rope["original_max_position_embeddings"]
    return float(np.sqrt(1 + np.log(config["max_position_embeddings"] / original) / np.log(original)))


def converted(config: Mapping[str, Any], weights: Tensors, arch: str) -> dict[str, np.ndarray]:
    """The tensors by their GGUF names, changed as the converter changes them."""
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), 8)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, value in weights.items():
        if arch.startswith("gemma") and "norm" in name:
            value = value + np.float32(1)
        part = name.split(".")[-2]
        if part == "shared_expert_gate":
            value = value[0]  # a vector, as older files have it
        if arch in PERMUTED and part in heads:
            value = value.reshape(heads[part], 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        expert = re.search(r"experts\.(\d+)\.", name)
        if expert:
            merged = name.replace(expert[0], "experts.")
            experts.setdefault(merged, {})[int(expert[1])] = value
        else:
            tensors[name] = value
    tensors |= {name: np.stack([values[i] for i in range(len(values))]) for name, values in experts.items()}
    found = {names.get_name(name, try_suffixes=(".weight", ".bias")): value for name, value in tensors.items()}
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return found | rope_tensors(config["rope_parameters"], width)


def rope_tensors(rope: Mapping[str, Any], width: int) -> dict[str, np.ndarray]:
    """Divisors of the frequencies: the converter writes longrope's two lists, and llama3's computed ones."""
    if rope.get("rope_type") == "longrope":
        lists = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
        return {name: np.array(rope[key], np.float32) for name, key in lists.items()}
    if rope.get("rope_type") != "llama3":
        return {}
    factors = []
    low, high, length = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    for exponent in np.arange(0, width, 2) / width:
        turns = length * rope["rope_theta"] ** -exponent / (2 * np.pi)
        kept = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / (kept + (1 - kept) / rope["factor"]))
    return {"rope_freqs.weight": np.array(factors, np.float32)}


def storage(value: np.ndarray, kind: str) -> gguf.GGMLQuantizationType:
    """Vectors stay float32; rows that do not divide into blocks are float16."""
    if value.ndim == 1:
        return gguf.GGMLQuantizationType.F32
    fits = kind in ("F32", "F16") or value.shape[-1] % 32 == 0
    return gguf.GGMLQuantizationType[kind if fits else "F16"]


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: Tensors,
    arch: str,
    kind: str = "F32",
    *,
    fields: Mapping[str, Any] | None = None,
    tensors: Tensors | None = None,
) -> None:
    """Writes a model without a tokenizer; `fields` and `tensors` are added to those that the config asks for."""
    writer = gguf.GGUFWriter(path, arch)
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in (own_fields(config, arch) | {"tokenizer.ggml.model": "none"} | dict(fields or {})).items():
        add[type(value)](key, value)
    for name, value in (converted(config, weights, arch) | dict(tensors or {})).items():
        kept = storage(value, "F32" if name in (tensors or {}) else kind)
        writer.add_tensor(name, gguf.quants.quantize(value, kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
