"""`jaxinfer inspect`: right numbers, from headers only."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxinfer.checkpoint import load_params, open_checkpoint, save_checkpoint
from jaxinfer.checkpoint.convert import convert_checkpoint
from jaxinfer.cli.main import main
from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.memory import kv_token_bytes

DATA = Path(__file__).parents[1] / "data"
GIVES_NO_WEIGHTS = "import numpy as np; np.memmap = None; from jaxinfer.cli.main import main; import sys; "
GIVES_NO_WEIGHTS += "status = main(sys.argv[1:]); print('jax' in sys.modules, status)"


@pytest.fixture
def inspect(capsys):
    """`inspect(path)`: the facts of --json."""

    def run(path) -> dict:
        capsys.readouterr()
        assert main(["inspect", str(path), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_llama_tied", "tiny_qwen2"])
def test_numbers_are_those_of_the_loaded_model(name, inspect):
    facts, checkpoint = inspect(DATA / name), open_checkpoint(DATA / name)
    params = load_params(checkpoint, "float32")
    assert facts["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert facts["bytes"] == sum(facts["bytes_by_dtype"].values())
    assert facts["format"] == "safetensors"
    assert facts["architecture"] == checkpoint.hf_config["architectures"][0]
    assert facts["tied_head"] == (name == "tiny_llama_tied")
    assert facts["context"] == 128
    assert facts["eos_token_ids"] == [2]
    assert facts["heads"] == {"query": 8, "key_value": 2, "width": 8}
    assert facts["other_settings"].get("qkv_bias", False) == (name != "tiny_llama")
    for dtype in ("float32", "bfloat16"):
        assert facts["kv_bytes_per_token"][dtype] == kv_token_bytes(checkpoint.model_config, dtype)


def test_kv_bytes_of_quantised_caches_count_the_scales(inspect):
    # 2 layers, keys and values of 2 heads of 8 channels; a float32 scale for each of the 8 vectors.
    expected = {"float32": 256, "bfloat16": 128, "int8": 64 + 32, "fp8": 64 + 32, "int4": 32 + 32}
    assert inspect(DATA / "tiny_llama")["kv_bytes_per_token"] == expected


def test_tokenizer_and_templates(write_checkpoint, tiny_config, tiny_params, inspect, capsys):
    folder = write_checkpoint(tiny_config, tiny_params(), eos_token_id=7)
    facts = inspect(folder)
    assert facts["special_tokens"] == {
        "bos_token": {"text": "<s>", "id": 256},
        "eos_token": {"text": "</s>", "id": 257},
    }
    assert facts["tokenizer"] == {"kind": "tokenizers", "vocab_size": 258, "num_special_tokens": 2}
    assert facts["chat_template"] is False
    (folder / "chat_template.jinja").write_text("x")
    (folder / "generation_config.json").write_text('{"temperature": 0.25, "transformers_version": "5"}')
    assert inspect(folder)["chat_template"] is True
    assert main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "special tokens:     bos_token <s> (256), eos_token </s> (257)\n" in text
    assert "chat template:      yes\n" in text
    assert "sampling defaults:  temperature 0.25\n" in text


def test_every_format_says_the_same_of_a_model(tmp_path, inspect, write_checkpoint, tiny_config, tiny_params):
    folder = write_checkpoint(tiny_config, tiny_params(), eos_token_id=7)
    convert_checkpoint(folder, tmp_path / "orbax", "orbax")
    left, right = inspect(folder), inspect(tmp_path / "orbax")
    assert right.pop("format") == "Orbax" and left.pop("format") == "safetensors"
    assert left.pop("path") != right.pop("path")
    assert left == right


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_llama_tied", "tiny_qwen2"])
def test_a_folder_without_weights(name, inspect, tmp_path, capsys):
    """As a Hub model's settings are: the numbers are those that the config asks for."""
    whole = inspect(DATA / name)
    for file in ("config.json", "generation_config.json"):
        shutil.copy(DATA / name / file, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    facts = inspect(tmp_path)
    assert (facts["weights"], whole["weights"], facts["format"]) == (False, True, "config only")
    assert facts["bytes_by_dtype"] == {"float32": 4 * whole["parameters"]}
    differing = {key for key in facts if facts[key] != whole[key]}
    assert differing <= {"path", "format", "weights", "bytes", "bytes_by_dtype", "tokenizer"}
    assert main(["inspect", str(tmp_path)]) == 0
    assert "(by the config; no weights are here)\n" in capsys.readouterr().out
    assert main(["convert", "--model", str(tmp_path), "--output", str(tmp_path / "x"), "--format", "orbax"]) == 2
    assert "model-00001-of-00002.safetensors is missing" in capsys.readouterr().err
    (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / "model.safetensors.index.json").unlink()
    assert main(["inspect", str(tmp_path)]) == 2
    assert "pytorch_model.bin is a pickle file" in capsys.readouterr().err


def test_of_a_hub_model_only_the_settings_are_fetched(inspect, tmp_path, monkeypatch):
    asked = []

    def download(repo_id, **options):
        asked.append((repo_id, options["revision"], options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *words, **named: None)
    shutil.copy(DATA / "tiny_qwen2" / "config.json", tmp_path)
    assert inspect("some-org/tiny-qwen2")["architecture"] == "Qwen2ForCausalLM"
    ((repo_id, revision, patterns),) = asked
    assert (repo_id, revision) == ("some-org/tiny-qwen2", None)
    assert "*.json" in patterns and not any("safetensors" in pattern for pattern in patterns)


def test_what_does_not_load_is_an_error_and_a_missing_tokenizer_is_a_fact(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert "is not a model directory" in capsys.readouterr().err
    assert main(["inspect", "./nowhere"]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["inspect", str(DATA / "tiny_llama")]) == 0
    text = capsys.readouterr().out
    assert "tokenizer:          none (" in text and "chat template:      no\n" in text


def test_neither_weights_nor_jax_are_touched():
    words = [sys.executable, "-c", GIVES_NO_WEIGHTS, "inspect", str(DATA / "tiny_llama")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False 0\n"), done.stdout


@pytest.mark.real_model
def test_smollm2(smollm2_path, inspect, capsys):
    start = time.process_time()
    facts = inspect(smollm2_path)
    assert time.process_time() - start < 2
    assert facts["parameters"] == 134515008
    assert facts["bytes_by_dtype"] == {"q4_1": 66355200, "q8_0": 30081024, "float32": 140544}
    assert facts["quantised_tensors"] == {"Q4_1": 210, "Q8_0": 1}
    assert facts["context"] == 8192
    assert facts["rope"] == {"theta": 100000.0, "scaling": {}}
    assert facts["other_settings"] == {"rms_norm_eps": float(np.float32(1e-5))}
    assert facts["special_tokens"]["bos_token"] == {"text": "<|im_start|>", "id": 1}
    assert facts["tokenizer"]["num_special_tokens"] == 17
    assert facts["chat_template"] is True
    assert facts["kv_bytes_per_token"]["bfloat16"] == 30 * 2 * 3 * 64 * 2
    assert main(["inspect", str(smollm2_path)]) == 0
    assert "quantisation:       Q4_1 (210 tensors), Q8_0 (1 tensor)\n" in capsys.readouterr().out


def test_rotary_factors(tmp_path, inspect, capsys, random_params):
    factors = tuple(float(i + 1) for i in range(16))
    config = ModelConfig(32, 64, 32, 1, 2, rope_freq_factors=factors)
    save_checkpoint(tmp_path / "saved", random_params(config), config)
    assert inspect(tmp_path / "saved")["rope"]["scaling"] == {"rope_freq_factors": list(factors)}
    assert main(["inspect", str(tmp_path / "saved")]) == 0
    assert "rope:               theta 10000, rope_freq_factors 16 values, 1 to 16\n" in capsys.readouterr().out


def test_rotary_scaling_by_its_kind_and_own_numbers(tmp_path, inspect, capsys):
    config = json.loads((DATA / "tiny_llama" / "config.json").read_text())
    scaling = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": scaling}))
    shown = {key: value for key, value in scaling.items() if key not in ("rope_type", "rope_theta")}
    assert inspect(tmp_path)["rope"]["scaling"] == {"rope_scaling": {"kind": "llama3", **shown}}
    assert main(["inspect", str(tmp_path)]) == 0
    line = (
        "rope_scaling llama3 (original_max_position_embeddings 32, factor 8, low_freq_factor 1, high_freq_factor 4)\n"
    )
    assert f"rope:               theta 10000, {line}" in capsys.readouterr().out


def test_a_warning_is_a_line(tmp_path, capsys):
    config = json.loads((DATA / "tiny_llama" / "config.json").read_text())
    unread = {"_model_name_or_path": "somewhere", "an_odd_one": 1}  # transformers has written the first for a while
    (tmp_path / "config.json").write_text(json.dumps(config | unread))
    assert main(["inspect", str(tmp_path)]) == 0
    expected = f"jaxinfer: warning: {tmp_path / 'config.json'}: unknown settings are not used: an_odd_one\n"
    assert capsys.readouterr().err == expected


def test_a_quantised_checkpoint_tells_method_bits_and_groups_and_what_becomes_of_them(capsys, tmp_path):
    folder = DATA / "quantised/awq_gemm"
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "quantisation:       awq, 4 bits in groups of 32 (13 matrices)" in out
    assert "7 int4 in groups of 32, asymmetric, kept as int8 per output channel (" in out
    options = ["--quantization", "awq_marlin", "--quantization-config", '{"fast_form": false}']
    assert main(["inspect", str(folder), "--json", *options]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["quantisation"] == "awq, 4 bits in groups of 32" and facts["quantised_tensors"] == {"AWQ": 13}
    assert facts["parameters"] == 69_952 and facts["bytes_by_dtype"]["awq"] == 31_968
    assert facts["stored_as"]["formats"]["int4 in groups of 32, asymmetric"]["parameters"] == 7
    assert main(["inspect", str(folder), "--quantization", "gptq"]) == 2
    assert "quantization='gptq' was asked for, but" in capsys.readouterr().err
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "(of the model in floats; no weights are here)" in out and "awq, 4 bits in groups of 32\n" in out


@pytest.mark.parametrize("text", ["x", "[64]"])
def test_options_that_are_no_json_object_are_told_what_one_is(text, capsys):
    assert main(["inspect", str(DATA / "tiny_llama"), "--quantization-config", text]) == 2
    message = f"argument --quantization-config: '{text}' is not a JSON object, such as '{{\"group_size\": 64}}'"
    assert message in capsys.readouterr().err


def test_how_an_engine_would_store_the_weights(capsys):
    assert main(["inspect", str(DATA / "tiny_llama"), "--json", "--quantization", "nf4"]) == 0
    stored = json.loads(capsys.readouterr().out)["stored_as"]
    assert stored["method"] == "nf4" and stored["device"] == "cpu"
    assert stored["bytes"] < stored["bytes_in_floats"]
    assert any("nf4 in groups of 64, kept as int8 per output channel" in text for text in stored["formats"])
    options = ["--quantization-config", '{"fast_form": false, "group_size": 32}']
    assert main(["inspect", str(DATA / "tiny_llama"), "--quantization", "nf4", *options]) == 0
    assert "nf4 in groups of 32 (" in capsys.readouterr().out
    assert main(["inspect", str(DATA / "tiny_llama"), *options]) == 2
    assert "quantization_config without quantization" in capsys.readouterr().err
    assert main(["inspect", str(DATA / "tiny_llama"), "--quantization", "awq"]) == 2
    assert "quantization='awq', but" in capsys.readouterr().err
