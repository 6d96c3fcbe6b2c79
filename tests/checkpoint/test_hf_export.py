"""The config.json of a model that came without one, read by our families and checked against what they say."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.checkpoint.convert import convert_checkpoint
from jaxinfer.checkpoint.hf_export import exported_config
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.registry import family_of_hf_config

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}


def bare(**fields) -> Checkpoint:
    """A model of which only the ModelConfig is known."""
    config = ModelConfig(**{**SIZES, **fields})
    return Checkpoint(Path("bare"), config, "float32", frozenset({2, 5}), {}, ())


@pytest.mark.parametrize(
    ("fields", "architecture"),
    [
        ({}, "LlamaForCausalLM"),
        ({"qkv_bias": True, "o_bias": True, "mlp_bias": True, "rope_theta": 5e5}, "LlamaForCausalLM"),
        ({"qkv_bias": True, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}, "Qwen2ForCausalLM"),
        ({"hidden_act": "gelu_tanh", "head_dim": 16, "max_position_embeddings": 99}, "LlamaForCausalLM"),
    ],
    ids=str,
)
def test_reads_back_as_the_same_config(fields, architecture):
    checkpoint = bare(**fields)
    family, config = exported_config(checkpoint)
    assert family.model_config(config) == checkpoint.model_config
    assert config["architectures"] == [architecture]
    assert config["eos_token_id"] == [2, 5]
    assert family.unknown_keys(config) == []


def test_hidden_act_is_spelled_as_transformers_does():
    assert exported_config(bare(hidden_act="gelu_tanh"))[1]["hidden_act"] == "gelu_pytorch_tanh"
    assert exported_config(bare())[1]["hidden_act"] == "silu"


def test_what_would_be_lost_is_named():
    with pytest.raises(ValueError, match="it would lose rope_freq_factors. The format 'orbax' keeps it"):
        exported_config(bare(rope_freq_factors=(1.0, 1.0, 2.0, 8.0)))


def test_biases_that_no_family_has():
    with pytest.raises(ValueError, match=r"would lose \w+_bias"):
        exported_config(bare(o_bias=True))


def test_a_config_that_came_along_is_kept(data_dir):
    checkpoint = open_checkpoint(data_dir / "tiny_qwen2")
    assert exported_config(checkpoint)[1] == checkpoint.hf_config


def test_one_that_contradicts_the_model_is_not(data_dir):
    checkpoint = open_checkpoint(data_dir / "tiny_llama")
    other = replace(checkpoint, model_config=replace(checkpoint.model_config, rope_theta=7.0))
    family, config = exported_config(other)
    assert config["rope_theta"] == 7.0
    assert family.model_config(config) == other.model_config


def test_the_table_is_that_of_the_family_which_the_config_names(family_case):
    """Also of a model that went through Orbax, which keeps the config but not the table."""
    (family_case.scratch / "config.json").write_text(json.dumps(family_case.config))
    checkpoint = open_checkpoint(family_case.scratch, needs_weights=False)
    family, config = exported_config(replace(checkpoint, family=None))
    assert family is family_of_hf_config(family_case.config)
    assert config == checkpoint.hf_config


@pytest.mark.filterwarnings("ignore:no tokenizer is written")
def test_phi3_through_orbax_has_its_own_tensors_again(make_case, tmp_path):
    source = make_case("phi3").folder()
    convert_checkpoint(source, tmp_path / "orbax", "orbax")
    convert_checkpoint(tmp_path / "orbax", tmp_path / "again", "safetensors")
    expected, written = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "again"))
    assert written.keys() == expected.keys()
    assert all((written[name] == expected[name]).all() for name in expected)


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen2"])
def test_gguf_settings_in_hugging_faces_words(name, gguf_twin, data_dir):
    checkpoint = open_checkpoint(gguf_twin(name))
    family, config = exported_config(checkpoint)
    assert family.model_config(config) == checkpoint.model_config
    assert "rope_scaling" not in config
    original = open_checkpoint(data_dir / name)
    assert config["architectures"] == original.hf_config["architectures"]
    assert config["eos_token_id"] == original.hf_config["eos_token_id"]
