"""The family tables: configs they read, names they refuse, and that they fill every parameter exactly once."""

import itertools
import math

import jax
import numpy as np
import pytest

from jaxinfer.checkpoint.tensor import Tensor
from jaxinfer.checkpoint.weight_map import place_weights
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


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", list(itertools.product([False, True], repeat=3)), ids=str)
def test_every_parameter_is_filled_exactly_once(family, kv_heads, tied, bias, tmp_path):
    qkv, o, mlp = bias
    sizes = {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "head_dim": 6, "tie_word_embeddings": tied}
    config = ModelConfig(131, 48, 80, 3, **sizes, qkv_bias=qkv, o_bias=o, mlp_bias=mlp)
    counts = {
        "/".join(key.key for key in path): np.zeros(leaf.shape, int)
        for path, leaf in jax.tree_util.tree_flatten_with_path(param_shapes(config))[0]
    }
    for style in ("hf", "gguf"):
        tensors = {}
        for weight in family.weights:
            for i in range(3) if weight.when(config) else ():
                name = getattr(weight, style).format(i=i)
                tensors[name] = Tensor(name, weight.tensor_shape(config), "float32", tmp_path, 0, 0, np.float32)
        for count in counts.values():
            count[...] = 0
        for placement in place_weights(family, config, tensors, style, tmp_path):
            part = counts[placement.leaf][placement.part]
            assert part.size == math.prod(placement.tensor.shape)
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


@pytest.mark.parametrize(
    "setting",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"rope_scaling": {"rope_type": "no such thing"}},
    ],
    ids=str,
)
def test_scaled_rope_is_refused_by_name(setting):
    (key, value), *_ = setting.items()
    kind = value.get("rope_type", value.get("type"))
    with pytest.raises(ValueError, match=rf"{key} of type '{kind}' is not supported"):
        model_config(LLAMA, **setting)


@pytest.mark.parametrize("setting", [None, {"type": "default"}, {"rope_type": "none"}], ids=str)
def test_plain_rope_scaling_is_accepted(setting):
    assert model_config(LLAMA, rope_scaling=setting) == model_config(LLAMA)


@pytest.mark.parametrize(
    ("config", "setting", "message"),
    [
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window=True"),
        (QWEN2, {"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        (LLAMA, {"quantization_config": {"quant_method": "awq"}}, "quant_method='awq'"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
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


def test_unknown_architecture_lists_the_supported():
    with pytest.raises(ValueError, match=r"\['NopeForCausalLM'\].*LlamaForCausalLM, Qwen2ForCausalLM"):
        family_of_hf_config({"architectures": ["NopeForCausalLM"], "model_type": "llama"})
    with pytest.raises(ValueError, match=r"'nope'.*llama, qwen2"):
        family_of_gguf("nope")


def test_model_type_serves_when_architectures_is_absent():
    assert family_of_hf_config({"model_type": "qwen2", "architectures": None}).name == "qwen2"
