"""Checkpoints of models that see, of which the text model is loaded: Gemma 3 (4B and up) and Mistral Small 3."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoint import load_params, open_checkpoint
from jaxinfer.checkpoint.convert import convert_checkpoint
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.gemma3 import GEMMA3
from jaxinfer.models.families.wrapper import text_config
from jaxinfer.models.registry import family_of_hf_config

Case = Any  # conftest's FamilyCase
TEXT_MODELS = {"gemma3_wrapped": "Gemma3ForCausalLM", "mistral3_wrapped": "MistralForCausalLM"}
pytestmark = pytest.mark.filterwarnings("ignore:.*only the text model of", "ignore:no tokenizer is written")


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_logits_of_the_text_model(name: str, make_case: Callable[[str], Case], all_logits: Any) -> None:
    case = make_case(name)
    checkpoint = open_checkpoint(case.folder())
    logits = all_logits(checkpoint.model_config, load_params(checkpoint, "float32"), case.tokens + case.greedy[:-1])
    count = len(case.tokens)
    np.testing.assert_allclose(logits[:count], case.logits(count), rtol=0, atol=1e-4)
    assert logits[count - 1 :].argmax(-1).tolist() == case.greedy
    assert checkpoint.eos_token_ids == {2}
    assert open_checkpoint(case.folder(eos_token_id=[2, 7])).eos_token_ids == {2, 7}  # the wrapper's word counts


def test_what_is_not_used_is_told_once(make_case: Callable[[str], Case]) -> None:
    case = make_case("gemma3_wrapped")
    with pytest.warns(UserWarning) as told:
        open_checkpoint(case.folder())
    (warning,) = told
    seeing = sum(name.startswith("vision_tower") for name in case.description["tensors"])
    assert str(warning.message).endswith(
        "only the text model of Gemma3ForConditionalGeneration is loaded. Not used: 2 tensors of "
        f"multi_modal_projector, {seeing} tensors of vision_tower; settings boi_token_index, "
        "eoi_token_index, image_token_index, mm_tokens_per_image, vision_config"
    )


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_the_names_that_transformers_has_in_memory(name: str, make_case: Callable[[str], Case]) -> None:
    folder = make_case(name).folder()
    before = load_params(open_checkpoint(folder), "float32")
    tensors = {}
    renamed = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
    for key, value in load_file(folder / "model.safetensors").items():
        prefix = next((old for old in renamed if key.startswith(old)), "")
        tensors[renamed.get(prefix, "model.") + key.removeprefix(prefix)] = value
    save_file(tensors, folder / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load_params(open_checkpoint(folder), "float32"), before)


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_converted_it_is_the_text_model_alone(name: str, make_case: Callable[[str], Case], tmp_path: Path) -> None:
    folder, out = make_case(name).folder(), tmp_path / "out"
    convert_checkpoint(folder, out, "safetensors")
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [TEXT_MODELS[name]]
    assert "vision_config" not in config and "text_config" not in config
    before, after = open_checkpoint(folder), open_checkpoint(out)
    assert after.model_config == before.model_config
    jax.tree.map(np.testing.assert_array_equal, load_params(after, "float32"), load_params(before, "float32"))


def test_gemma_3_4b_as_released_leaves_sizes_to_their_defaults() -> None:
    """Its text_config has no more than this."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = text_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    assert family_of_hf_config(config) is GEMMA3
    read = GEMMA3.model_config(config)
    assert isinstance(read, ModelConfig) and read.tie_word_embeddings
    sizes = (read.vocab_size, read.num_attention_heads, read.num_key_value_heads, read.head_dim)
    assert sizes == (262208, 8, 4, 256)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, r"config\.json: Gemma3ForConditionalGeneration needs a text_config"),
        ({"text_config": {"model_type": "gemma9_text"}}, r"model_type='gemma9_text' is not supported"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method='hqq', which is not supported"),
    ],
    ids=["none", "unknown", "quantised"],
)
def test_what_is_refused(changes: dict[str, Any], message: str, make_case: Callable[[str], Case]) -> None:
    with pytest.raises(ValueError, match=message):
        open_checkpoint(make_case("gemma3_wrapped").folder(**changes))
