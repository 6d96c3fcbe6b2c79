"""GGUF twins of the families' tiny checkpoints: names by the gguf package, values as llama.cpp's converter has them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest

from jaxinfer.checkpoint import load_params, open_checkpoint
from jaxinfer.models.config import ModelConfig

Case = Any  # conftest's FamilyCase
KEYS = gguf.Keys
# Case -> architecture, and what its GGUF file cannot say otherwise than so.
TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"use_sliding_window": False, "layer_types": ...}),
    "qwen3_moe_unnormalised": ("qwen3moe", {"norm_topk_prob": True}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 16}),
    "phi3": ("phi3", {}),
    "phi3_longrope": ("phi3", {}),
    "granite": ("granite", {}),
}


def fields(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
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
        KEYS.LLM.EXPERT_COUNT: config.get("num_local_experts"),
        KEYS.LLM.EXPERT_USED_COUNT: config.get("num_experts_per_tok"),
        KEYS.LLM.EXPERT_FEED_FORWARD_LENGTH: config.get("moe_intermediate_size"),
        KEYS.Rope.FREQ_BASE: float(full["rope_theta"]),
        "{arch}.rope.freq_base_swa": local.get("rope_theta"),
        KEYS.Rope.DIMENSION_COUNT: int(width * partial),
        KEYS.Rope.SCALING_TYPE: "linear" if scaled else None,
        KEYS.Rope.SCALING_FACTOR: full["factor"] if scaled else None,
        KEYS.Rope.SCALING_ORIG_CTX_LEN: full.get("original_max_position_embeddings"),
    }
    return {key.format(arch=arch): value for key, value in values.items() if value is not None}


def converted(case: Case, arch: str) -> dict[str, np.ndarray]:
    """The tensors by their GGUF names, changed as the converter changes them."""
    config, names = case.config, gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), 8)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, value in case.weights().items():
        if arch.startswith("gemma") and "norm" in name:
            value = value + np.float32(1)
        part = name.split(".")[-2]
        if arch == "granite" and part in heads:
            value = value.reshape(heads[part], 2, -1, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
        expert = re.search(r"experts\.(\d+)\.", name)
        if expert:
            merged = name.replace(expert[0], "experts.")
            experts.setdefault(merged, {})[int(expert[1])] = value
        else:
            tensors[name] = value
    tensors |= {name: np.stack([values[i] for i in range(len(values))]) for name, values in experts.items()}
    return {names.get_name(name, try_suffixes=(".weight", ".bias")): value for name, value in tensors.items()}


def storage(value: np.ndarray, kind: str) -> gguf.GGMLQuantizationType:
    """Vectors stay float32; rows that do not divide into blocks are float16."""
    if value.ndim == 1:
        return gguf.GGMLQuantizationType.F32
    fits = kind in ("F32", "F16") or value.shape[-1] % 32 == 0
    return gguf.GGMLQuantizationType[kind if fits else "F16"]


@pytest.fixture
def twin(tmp_path: Path) -> Callable[[Case, str], Path]:
    """`twin(case, "Q8_0")`: the case as a GGUF file."""

    def write(case: Case, kind: str) -> Path:
        arch, path = TWINS[case.name][0], tmp_path / f"{case.name}-{kind}.gguf"
        writer = gguf.GGUFWriter(path, arch)
        for key, value in fields(case.config, arch).items():
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(key, value)
        for name, value in converted(case, arch).items():
            kept = storage(value, kind)
            writer.add_tensor(name, gguf.quants.quantize(value, kept), raw_dtype=kept)
        rope = case.config["rope_parameters"]
        if rope.get("rope_type") == "longrope":
            for name, key in (("rope_factors_long", "long_factor"), ("rope_factors_short", "short_factor")):
                writer.add_tensor(f"{name}.weight", np.array(rope[key], np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def near(left: ModelConfig, right: ModelConfig) -> bool:
    """Equal but for numbers that GGUF files hold in float32."""
    numbers = ("rms_norm_eps", "query_scale", "residual_multiplier", "rope_theta", "local_rope_theta")
    same = {name: getattr(right, name) for name in numbers}
    if left.rope_scaling is not None and left.rope_scaling.long_factor is not None:
        same["rope_scaling"] = right.rope_scaling
        assert left.rope_scaling.long_factor == pytest.approx(right.rope_scaling.long_factor)  # type: ignore[union-attr]
        assert left.rope_scaling.magnitude() == pytest.approx(right.rope_scaling.magnitude())  # type: ignore[union-attr]
    assert [getattr(left, name) or 0 for name in numbers] == pytest.approx([same[name] or 0 for name in numbers])
    return replace(left, **same) == right


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", TWINS)
def test_parameters_are_those_of_the_rounded_directory(
    name: str, kind: str, make_case: Callable[[str], Case], twin: Callable[[Case, str], Path]
) -> None:
    """Bit for bit, and the architecture too; the norms of Gemma have their 1 in the file."""
    case = make_case(name)
    checkpoint = open_checkpoint(twin(case, kind))
    directory = open_checkpoint(case.folder(**TWINS[name][1]))
    gemma = directory.model_config.norm_unit_offset
    assert near(checkpoint.model_config, replace(directory.model_config, norm_unit_offset=False))

    def rounded(path: Any, leaf: jax.Array) -> np.ndarray:
        value = np.asarray(leaf)
        if gemma and "norm" in jax.tree_util.keystr(path):
            return value + np.float32(1)
        return value

    expected = load_params(open_checkpoint(case.folder(rounding=kind, **TWINS[name][1])), "float32")
    loaded = load_params(checkpoint, "float32")
    jax.tree.map(np.testing.assert_array_equal, loaded, jax.tree_util.tree_map_with_path(rounded, expected))


@pytest.mark.parametrize("name", ["gemma", "phi3", "granite"])
def test_float32_files_give_the_logits_of_transformers(
    name: str, make_case: Callable[[str], Case], twin: Callable[[Case, str], Path], all_logits: Any
) -> None:
    case = make_case(name)
    checkpoint = open_checkpoint(twin(case, "F32"))
    logits = all_logits(checkpoint.model_config, load_params(checkpoint, "float32"), case.tokens)
    np.testing.assert_allclose(logits, case.logits(len(case.tokens)), rtol=0, atol=1e-4)
