"""The family tables: configs they read, names they refuse, and that they fill every parameter exactly once."""

import math
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxinfer.checkpoint.tensor import Tensor
from jaxinfer.checkpoint.weight_map import place_weights
from jaxinfer.models import families
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes
from jaxinfer.models.registry import FAMILIES, family_of_gguf, family_of_hf_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}


def model_config(config: dict, **changes: object) -> ModelConfig:
    merged = {**config, **changes}
    return family_of_hf_config(merged).model_config(merged)


# One of each shape of layer: what a family may leave open is tried below with every family's own configs.
VARIANTS = {
    "plain": {},
    "grouped": {"num_key_value_heads": 2},
    "tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True, "use_qkv_bias": True},
    "odd": {"use_qk_norm": True, "qk_layernorm": True, "use_parallel_residual": True},
    "sequential": {"use_parallel_residual": False, "mlp_only_layers": [1]},
}
GPT2_SIZES = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_inner": 80, "n_positions": 32}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_is_filled_exactly_once(family, variant, tmp_path):
    sizes = GPT2_SIZES | {"vocab_size": 131} if family.name == "gpt2" else LLAMA | {"head_dim": 16}
    sizes = sizes | {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "rotary_pct": 0.5}
    config = family.model_config({**sizes, **VARIANTS[variant]})
    counts = {
        "/".join(key.key for key in path): np.zeros(leaf.shape, int)
        for path, leaf in jax.tree_util.tree_flatten_with_path(param_shapes(config))[0]
    }
    for style in ("hf", "gguf") if family.gguf_architectures else ("hf",):
        tensors = {}
        for weight in family.weights:
            for i, kind in enumerate(config.layer_kinds):
                if not (getattr(weight, style) and weight.when(config) and weight.layers(kind)):
                    continue
                for item in range(weight.items(config)):
                    name = getattr(weight, style).format(i=i, e=item)
                    tensors[name] = Tensor(name, weight.tensor_shape(config), "float32", tmp_path, 0, 0, np.float32)
        for count in counts.values():
            count[...] = 0
        for placement in place_weights(family, config, tensors, style, tmp_path):
            part = placement.slot.view(counts[placement.slot.leaf])
            assert part.size == math.prod(placement.slot.shape)
            part += 1
        assert all((count == 1).all() for count in counts.values())


def test_llama_defaults():
    config = model_config(LLAMA)
    assert config == ModelConfig(131, 48, 80, 3, 4, 4, 12, 2048, 10000.0, None, 1e-6)


def test_llama_settings():
    config = model_config(
        LLAMA,
        num_key_value_heads=2,
        head_dim=16,
        rope_theta=5e5,
        rms_norm_eps=1e-5,
        hidden_act="gelu_pytorch_tanh",
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        max_position_embeddings=64,
    )
    assert config == ModelConfig(
        131, 48, 80, 3, 4, 2, 16, 64, 5e5, None, 1e-5, "gelu_tanh", True, True, True, tie_word_embeddings=True
    )


def test_qwen2_has_biases_on_qkv_only():
    config = model_config(QWEN2)
    assert (config.qkv_bias, config.o_bias, config.max_position_embeddings) == (True, False, 32768)


def test_rope_theta_inside_rope_parameters():
    assert model_config(LLAMA, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}).rope_theta == 5e5


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_unknown_rope_types_are_refused_by_name(key, spelling):
    with pytest.raises(ValueError, match=rf"{key} of type 'spiral' is not supported; use one of default, linear, dyn"):
        model_config(LLAMA, **{key: {spelling: "spiral", "factor": 2.0}})


@pytest.mark.parametrize("setting", [None, {"type": "default"}, {"rope_type": "none"}], ids=str)
def test_plain_rope_scaling_is_accepted(setting):
    assert model_config(LLAMA, rope_scaling=setting) == model_config(LLAMA)


@pytest.mark.parametrize(
    ("config", "setting", "message"),
    [
        (QWEN2, {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 0}, "sliding_window=0"),
        (QWEN2, {"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
        (QWEN2, {"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers=3"),
        (LLAMA, {"partial_rotary_factor": 0.6}, "rotary_dim=7 must be even"),
        (LLAMA, {"hidden_act": "mish"}, "hidden_act='mish'"),
        (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
        (LLAMA, {"vocab_size": None}, "no 'vocab_size'"),
        (LLAMA, {"hidden_size": "48"}, "hidden_size='48' must be an int"),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused_by_name(config, setting, message):
    with pytest.raises(ValueError, match=message):
        model_config(config, **setting)


def test_unknown_keys_are_told():
    family = family_of_hf_config(LLAMA)
    assert family.unknown_keys({**LLAMA, "bos_token_id": 1, "residual_multiplier": 2}) == ["residual_multiplier"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_heads_are_tied_by_default_where_transformers_ties_them(family):
    """A config that does not say (field case 22)."""
    tied = {"gemma", "gemma2", "gemma3_text", "smollm3", "cohere", "cohere2", "gpt2"}
    sizes = GPT2_SIZES | {"vocab_size": 131} if family.name == "gpt2" else LLAMA | {"head_dim": 16, "rotary_pct": 0.5}
    assert family.model_config(sizes).tie_word_embeddings == (family.name in tied)
    for flag in (True, False):
        assert family.model_config({**sizes, "tie_word_embeddings": flag}).tie_word_embeddings == flag


def test_a_family_is_a_table_of_at_most_100_lines():
    folder = Path(families.__file__).parent
    shared = {"family.py", "weights.py", "base.py", "hf_config.py", "hf_rope.py", "wrapper.py"}
    lengths = {path.name: len(path.read_text().splitlines()) for path in folder.glob("*.py") if path.name not in shared}
    assert len(lengths) > 17
    assert {name: length for name, length in lengths.items() if length > 100} == {}


@pytest.mark.parametrize("name", ["DeepseekV2ForCausalLM", "Qwen2VLForConditionalGeneration", "T5Model"])
def test_what_is_not_built_is_refused_with_the_supported(name):
    with pytest.raises(ValueError, match=rf"'{name}'\] is not supported; supported architectures: LlamaForCausalLM, "):
        family_of_hf_config({"architectures": [name], "model_type": "llama"})


def test_unknown_architecture_lists_the_supported():
    with pytest.raises(
        ValueError, match=r"\['NopeForCausalLM'\].*LlamaForCausalLM, .*Qwen2ForCausalLM, .*GPTNeoXForCausalLM"
    ):
        family_of_hf_config({"architectures": ["NopeForCausalLM"], "model_type": "llama"})
    with pytest.raises(
        ValueError, match=r"'nope'.*llama, qwen2, qwen3, qwen2moe, qwen3moe, gemma, gemma2, gemma3, phi3, granite"
    ):
        family_of_gguf("nope")


def test_model_type_serves_when_architectures_is_absent():
    assert family_of_hf_config({"model_type": "qwen2", "architectures": None}).name == "qwen2"
