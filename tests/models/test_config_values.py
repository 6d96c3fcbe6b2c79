"""What a config.json says is checked where it is read: every refusal speaks of the file's own key and its value."""

import re
from typing import Any

import pytest

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.registry import family_of_hf_config

SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 128,
}
GPT2 = {"vocab_size": 32, "n_embd": 64, "n_layer": 2, "n_head": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
NAN = float("nan")


def read(family: str, **config: Any) -> ModelConfig:
    merged = {"model_type": family, **(GPT2 if family == "gpt2" else SIZES), **config}
    return family_of_hf_config(merged).model_config(merged)


def scaled(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **settings}}


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        # numbers that are divided by, or in no range
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be an int of at least 1"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 must be a number above 0"),
        ("gemma3_text", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar=-1 must be a number above 0"),
        ("granite", {"logits_scaling": 0}, "logits_scaling=0 must be a number above 0"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern=0 must be an int of at least 1"),
        ("cohere2", {"sliding_window_pattern": 0}, "sliding_window_pattern=0 must be an int of at least 1"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0 must be an int of at least 1"),
        ("llama", {"num_attention_heads": 0, "partial_rotary_factor": 0.5}, "num_attention_heads=0 must be an int"),
        ("qwen3_moe", {"num_attention_heads": 0}, "num_attention_heads=0 must be an int of at least 1"),
        ("llama", {"partial_rotary_factor": 0}, "partial_rotary_factor=0 must be a number above 0"),
        ("llama", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 must be at most 1"),
        ("gpt_neox", {"rotary_pct": 0}, "rotary_pct=0 must be a number above 0"),
        ("gpt_neox", {"rotary_pct": 0.01}, "rotary_pct=0.01 rotates no channel of a head of 8"),
        ("llama", {"rms_norm_eps": NAN}, "rms_norm_eps=nan must be a number above 0"),
        ("llama", {"rope_theta": float("inf")}, "rope_theta=inf must be a number above 0"),
        ("llama", {"rope_theta": 10**400}, "rope_theta=1000"),
        # values of another type
        ("llama", {"num_attention_heads": "8"}, "num_attention_heads='8' must be an int"),
        ("qwen3_moe", {"num_attention_heads": "8"}, "num_attention_heads='8' must be an int"),
        ("llama", {"vocab_size": True}, "vocab_size=True must be an int"),
        ("llama", {"rope_theta": "x"}, "rope_theta='x' must be a number above 0"),
        ("granite", {"attention_multiplier": "x"}, "attention_multiplier='x' must be a number above 0"),
        ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or false"),
        ("llama", {"attention_bias": "no"}, "attention_bias='no' must be true or false"),
        ("llama", {"hidden_act": ["silu"]}, "hidden_act=['silu'] is not supported"),
        ("gemma2", {"layer_types": 3}, "layer_types=3 must be a list of strings"),
        ("smollm3", {"no_rope_layers": 1}, "no_rope_layers=1 must be a list of ints"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for num_hidden_layers=4"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers=1 must be a list of ints"),
        # keys that we have another name for
        ("gpt2", {"n_embd": "64"}, "n_embd='64' must be an int"),
        ("gpt2", {"n_head": 0}, "n_head=0 must be an int of at least 1"),
        ("gpt2", {"n_head": 5}, "n_embd=64 is not a multiple of n_head=5"),
        ("gpt2", {"n_layer": None}, "no 'n_layer'"),
        ("gemma2", {"attn_logit_softcapping": "x"}, "attn_logit_softcapping='x' must be a number above 0"),
        ("gemma", {"hidden_act": "gelu", "hidden_activation": "x"}, "hidden_activation='x' is not supported"),
        ("cohere", {"logit_scale": -1}, "logit_scale=-1 must be a number above 0"),
        ("stablelm", {"layer_norm_eps": NAN}, "layer_norm_eps=nan must be a number above 0"),
        # rotations
        ("phi3", {"original_max_position_embeddings": 0, **scaled("su")}, "original_max_position_embeddings=0 must be"),
        (
            "llama",
            scaled("yarn", original_max_position_embeddings=0),
            "rope_scaling.original_max_position_embeddings=0",
        ),
        ("llama", {"rope_theta": 1, **scaled("yarn", factor=4.0)}, "rope_theta=1.0 must be above 1"),
        ("llama", scaled("yarn", factor=4.0, attention_factor="x"), "rope_scaling.attention_factor='x' must be a numb"),
        ("llama", scaled("yarn", factor=4.0, truncate="no"), "rope_scaling.truncate='no' must be true or false"),
        ("llama", scaled("llama3", **LLAMA3 | {"factor": "8"}), "rope_scaling.factor='8' must be a number above 0"),
        ("llama", scaled("llama3", **LLAMA3 | {"low_freq_factor": None}), "'llama3' has no 'low_freq_factor'"),
        ("llama", scaled("llama3", factor=8.0, low_freq_factor=1.0), "'llama3' has no 'high_freq_factor'"),
        ("llama", scaled("llama3", **LLAMA3 | {"original_max_position_embeddings": None}), "has no 'original_max_pos"),
        ("phi3", scaled("longrope", short_factor="x", long_factor=[1.0]), "short_factor='x' must be a list of numbers"),
        ("phi3", scaled("longrope", short_factor=[0.0], long_factor=[1.0]), "rope_scaling.short_factor[0]=0.0 must be"),
        ("llama", {"head_dim": 2, **scaled("dynamic", factor=2.0)}, "at least 4 channels, not 2"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": "x"}},
            "rope_parameters.full_attention='x' must be",
        ),
        ("gemma3_text", {"rope_local_base_freq": "x"}, "rope_local_base_freq='x' must be a number above 0"),
    ],
    ids=str,
)
def test_a_refusal_names_the_files_key_and_value(family: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read(family, **config)


def test_rope_scaling_counts_beside_rope_parameters() -> None:
    """As in transformers 5.24, whose LlamaConfig and Gemma3TextConfig gave these settings."""
    plain = {"rope_type": "default", "rope_theta": 1e4}
    both = read("llama", rope_parameters=plain, rope_scaling=YARN)
    assert both == read("llama", rope_scaling=YARN)
    assert both.rope_scaling is not None and both.rope_scaling.kind == "yarn"
    assert read("llama", rope_parameters=YARN, rope_scaling=plain).rope_scaling is None
    assert read("llama", rope_parameters=YARN, rope_scaling={}).rope_scaling == both.rope_scaling
    layers = {"full_attention": plain | {"rope_theta": 7e5}, "sliding_attention": plain | {"rope_theta": 3e3}}
    config = read("gemma3_text", rope_parameters=layers, **scaled("linear", factor=4.0))
    assert config.rope_scaling is not None and config.rope_scaling.kind == "linear"
    assert (config.rope_theta, config.local_rope_theta) == (7e5, 3e3)


def test_a_base_that_rope_scaling_would_drop_is_refused() -> None:
    parameters = {"rope_type": "default", "rope_theta": 5e5}
    with pytest.raises(ValueError, match=r"rope_theta=500000\.0 would be lost; give rope_theta in rope_scaling"):
        read("llama", rope_parameters=parameters, rope_scaling=YARN)
    config = read("llama", rope_parameters=parameters, rope_scaling={**YARN, "rope_theta": 5e5})
    assert config.rope_theta == 5e5


def test_finetuned_says_nothing_of_the_frequencies() -> None:
    assert read("llama", rope_scaling={**YARN, "finetuned": True}) == read("llama", rope_scaling=YARN)
