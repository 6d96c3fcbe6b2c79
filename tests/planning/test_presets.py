"""Models by name and by size."""

import json
from pathlib import Path

import pytest

from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.formulas import count_parameters
from jaxinfer.planning.planned_model import planned_model
from jaxinfer.planning.presets import PRESETS, billions, generic_model, preset_named

DATA = Path(__file__).parents[1] / "data"

# As their publishers count them (Hugging Face model cards); gemma-3-12b without its vision tower.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "gpt2": 124_439_808,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-2b": 2_506_172_416,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-12b": 11_766_034_176,
    "phi-4": 14_659_507_200,
    "pythia-6.9b": 6_857_302_016,
    "smollm3-3b": 3_075_098_624,
    "olmo-2-7b": 7_298_617_344,
}


def test_every_preset_has_its_published_size() -> None:
    assert {name: count_parameters(model).total for name, model in PRESETS.items()} == PUBLISHED


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen2.5-72B-Instruct", "qwen2.5-72b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("openai-community/gpt2", "gpt2"),
    ],
)
def test_names(name: str, preset: str) -> None:
    assert preset_named(name) == (preset, PRESETS[preset])
    assert planned_model(name).name == preset


def test_other_names() -> None:
    for name in ("gpt-9", "Qwen/Qwen2.5-7B-Instruct-AWQ", "llama", ""):
        assert preset_named(name) is None


@pytest.mark.parametrize(
    ("size", "number"), [(7, 7.0), (0.5, 0.5), ("7", 7.0), ("72B", 72.0), ("1.5b", 1.5), ("8 b", 8.0), ("x7b", None)]
)
def test_sizes(size: float | str, number: float | None) -> None:
    assert billions(size) == number


@pytest.mark.parametrize("size", [0, -1, 7e9])
def test_sizes_are_billions(size: float) -> None:
    with pytest.raises(ValueError, match="must be billions of parameters"):
        billions(size)


@pytest.mark.parametrize("size", [0.1, 0.5, 1, 1.5, 3, 7, 8, 13, 14, 32, 34, 70, 72, 123, 236, 405, 1000])
def test_a_size_makes_a_model_of_that_size(size: float) -> None:
    model = generic_model(size)
    assert count_parameters(model).total / 1e9 == pytest.approx(size, rel=0.06)
    assert model.num_key_value_heads < model.num_attention_heads
    assert planned_model(size).config == planned_model(f"{size}B").config == model


def test_a_size_that_no_decoder_has() -> None:
    with pytest.raises(ValueError, match="too small"):
        generic_model(0.01)


def test_models_of_other_kinds(tmp_path: Path) -> None:
    tiny = planned_model(DATA / "tiny_llama")
    assert tiny.name == "tiny_llama" and tiny.config.hidden_size == 64
    assert planned_model(str(DATA / "tiny_llama/config.json")) == tiny
    config = ModelConfig(8, 16, 32, 1, 2)
    assert planned_model(config).config is config
    quantised = json.loads((DATA / "tiny_llama/config.json").read_text())
    quantised["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    assert planned_model(tmp_path).quant == "awq" and planned_model(tmp_path).config == tiny.config
    quantised["quantization_config"]["version"] = "marlin"
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(ValueError, match="config.json: .*version='marlin'"):
        planned_model(tmp_path)


@pytest.mark.parametrize(
    ("folder", "method", "quant", "bits"),
    [
        ("awq_row", "awq", "awq", 4 + 48 / 64),  # a 16-bit scale and a 32-bit offset for all 64 (96 of down) inputs
        ("gptq_v1", "gptq", "gptq", 4 + 32 / 32),  # of 16 bits both, in groups of 32
        ("gptq_v2_8bit", "gptq", "int8", 8 + 48 / 32 + 32 / 106.7),  # and the inputs' order, of 107 outputs on average
        ("gptq_act_order", "gptq", "gptq", 9.2333),  # qkv in floats, as its parts' orders differ
        ("ct_w4a16", "compressed-tensors", "int4", 4 + 64 / 32),  # of 32 bits both
        ("ct_w8a8", "compressed-tensors", "int8_w8a8", 8 + 32 / 64),
        ("ct_fp8", "compressed-tensors", "fp8", 8 + 32 / 64),
        ("bnb_int8", "bitsandbytes", "int8", 8 + 32 / 64),
        ("bnb_nf4", "bitsandbytes", "nf4", 4 + 32 / 64 + 0.0556),  # a table of 64 bytes each
        ("bnb_fp4", "bitsandbytes", "fp4", 4 + 32 / 64 + 0.0556),
        ("fp8_block", "fp8", "fp8", 8 + 32 / 128),
    ],
)
@pytest.mark.filterwarnings("ignore:the checkpoint's", "ignore:.*do not go together")
def test_quantised_checkpoints(folder: str, method: str, quant: str, bits: float) -> None:
    found = planned_model(DATA / "quantised" / folder)
    assert (found.method, found.quant) == (method, quant)
    assert found.stored is not None
    assert found.stored.bits == pytest.approx(bits, rel=0.02)


def test_a_quantised_checkpoint_of_which_only_the_config_is_here(tmp_path: Path) -> None:
    """Scales are taken for 16 bits."""
    (tmp_path / "config.json").write_bytes((DATA / "quantised/ct_w4a16/config.json").read_bytes())
    found = planned_model(tmp_path)
    assert found.method == "compressed-tensors"
    assert found.stored is not None and found.stored.bits == 4 + 32 / 32


def test_no_such_model() -> None:
    with pytest.raises(ValueError, match="does not exist.*Models known by name: smollm2-135m"):
        planned_model("./nowhere.gguf")
    with pytest.raises(TypeError, match="model_size=None"):
        planned_model(None)  # type: ignore[arg-type]
