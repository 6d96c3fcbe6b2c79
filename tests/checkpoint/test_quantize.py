"""Quantised checkpoints: what is written loads as what is rounded while it is loaded."""

import json
import re

import jax
import numpy as np
import pytest

from jaxinfer.checkpoint import load_params, open_checkpoint, quantize
from jaxinfer.checkpoint.convert import convert_checkpoint
from jaxinfer.checkpoint.quantize import quantize_checkpoint
from jaxinfer.checkpoint.safetensors import read_safetensors
from jaxinfer.quant.array import CodedScale, QuantArray
from jaxinfer.quant.plan import QuantPlan
from jaxinfer.quant.quantize import dequantized

pytestmark = pytest.mark.filterwarnings("ignore:no tokenizer is written")
METHODS = {
    "int8": {},
    "int8_groups": {"group_size": 32},
    "int8_w8a8": {},
    "fp8": {},
    "int4": {"group_size": 32},
    "int4_asymmetric": {"group_size": 32, "symmetric": False},
    "nf4": {"group_size": 32},
    "fp4": {"group_size": 32},
    "nf4_double": {"group_size": 32, "double_quant": True},
}
FAMILIES = [
    ("mixtral", "int8"),
    ("mixtral", "int4"),
    ("qwen2_moe", "int8"),
    ("gemma", "int8"),
    ("phi3", "int4"),
    ("cohere", "int4"),
    ("gpt_neox", "nf4"),
]


def is_quantised(leaf):
    return isinstance(leaf, QuantArray)


def rounded(folder, method, options):
    """A folder's parameters, rounded while they are loaded."""
    plan = QuantPlan(
        method,
        group=options.get("group_size"),
        symmetric=options.get("symmetric", True),
        double=options.get("double_quant", False),
    )
    return jax.tree.map(np.asarray, load_params(open_checkpoint(folder), "float32", plan=plan))


def assert_same(written, expected):
    left, right = (
        dict(jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantised)) for tree in (written, expected)
    )
    assert left.keys() == right.keys()
    for path, value in right.items():
        assert is_quantised(value) == is_quantised(left[path]), path
        if not is_quantised(value):
            np.testing.assert_array_equal(left[path], value)
            continue
        np.testing.assert_array_equal(left[path].codes, value.codes, err_msg=str(path))
        assert left[path].act_bits == value.act_bits
        if isinstance(value.scale, CodedScale):  # a layer's scales are coded with those of that layer only
            largest = np.abs(dequantized(value)).max()
            np.testing.assert_allclose(dequantized(left[path]), dequantized(value), atol=0.03 * largest)
        else:
            np.testing.assert_array_equal(dequantized(left[path]), dequantized(value), err_msg=str(path))


@pytest.mark.parametrize("method", METHODS)
def test_what_is_written_is_what_is_rounded_while_loading(method, data_dir, tmp_path, stored_params):
    name, options = re.sub("_(asymmetric|double|groups)$", "", method), METHODS[method]
    done = quantize_checkpoint(data_dir / "tiny_qwen2", tmp_path / "out", name, dtype="float32", **options)
    assert_same(stored_params(tmp_path / "out"), rounded(data_dir / "tiny_qwen2", name, options))
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert done.nbytes == sum(tensor.nbytes for tensor in read_safetensors(done.path / "model.safetensors").values())
    assert len(done.errors) == 8 and all(0 < one.error < 0.03 and one.rounded is None for one in done.errors)


def test_errors_are_those_of_the_values(data_dir, tmp_path, monkeypatch, stored_params):
    monkeypatch.setattr(quantize, "ERROR_CHUNK", 500)  # several pieces, the last of them shorter
    done = quantize_checkpoint(data_dir / "tiny_qwen2", tmp_path / "out", "int4", dtype="float32", symmetric=False)
    original, written = load_params(open_checkpoint(data_dir / "tiny_qwen2"), "float32"), stored_params(done.path)
    for one in done.errors:
        layer, module, name, _ = one.path.split("/")
        before = np.asarray(original[layer][module][name]["kernel"], np.float64)
        after = dequantized(written[layer][module][name]["kernel"])
        assert one.error == pytest.approx(((after - before) ** 2).sum() / (before**2).sum(), rel=1e-5)


@pytest.mark.parametrize(("family", "method"), FAMILIES)
def test_families(family, method, make_case, tmp_path, stored_params):
    """Experts; norms that add 1, and a tied head; projections that the file has fused; rotary channels in pairs."""
    source, options = make_case(family).folder(), METHODS[method]
    quantize_checkpoint(source, tmp_path / "out", method, **options)
    assert_same(stored_params(tmp_path / "out"), rounded(source, method, options))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    said = {key: value for key, value in config.items() if key != "quantization_config"}
    assert said == json.loads((source / "config.json").read_text())


def test_files_beside_the_weights_come_along(small_model, tmp_path):
    assert quantize_checkpoint(small_model, tmp_path / "out", "fp8", dtype="bfloat16").tokenizer
    written = open_checkpoint(tmp_path / "out")
    assert written.generation_config == {"temperature": 0.3}
    assert written.dtype == "bfloat16" and written.eos_token_ids == {7}
    tokenizer = written.tokenizer()
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x!"


def test_quantised_heads_and_tied_ones(small_model, data_dir, tmp_path, stored_params):
    quantize_checkpoint(small_model, tmp_path / "out", "int8", quantize_head=True)
    expected = load_params(open_checkpoint(small_model), "float32", plan=QuantPlan("int8", head=True))
    assert_same(stored_params(tmp_path / "out"), jax.tree.map(np.asarray, expected))
    with pytest.raises(ValueError, match="quantize_head=True: this model's head is its embedding"):
        quantize_checkpoint(data_dir / "tiny_llama_tied", tmp_path / "tied", "int8", quantize_head=True)
    quantize_checkpoint(data_dir / "tiny_llama_tied", tmp_path / "tied", "int8", dtype="float32")
    assert_same(stored_params(tmp_path / "tied"), rounded(data_dir / "tiny_llama_tied", "int8", {}))


def test_other_sources(gguf_twin, data_dir, tmp_path, stored_params):
    source = gguf_twin("tiny_llama", "Q8_0")
    quantize_checkpoint(source, tmp_path / "from_gguf", "int4", dtype="float32", group_size=32)
    assert_same(stored_params(tmp_path / "from_gguf"), rounded(source, "int4", {"group_size": 32}))
    convert_checkpoint(data_dir / "tiny_llama", tmp_path / "orbax", "orbax")
    quantize_checkpoint(tmp_path / "orbax", tmp_path / "from_orbax", "int8", dtype="float32")
    assert_same(stored_params(tmp_path / "from_orbax"), rounded(data_dir / "tiny_llama", "int8", {}))


def test_values_beyond_float16_are_told(hf_copy, tmp_path):
    source = hf_copy("tiny_llama", lambda tensors: tensors["model.norm.weight"].__imul__(1e6))
    with pytest.warns(UserWarning, match="'model.norm.weight' has values beyond float16's 65504"):
        quantize_checkpoint(source, tmp_path / "out", "int8", dtype="float16")


def test_weights_that_are_not_finite_are_named_and_nothing_is_left(hf_copy, tmp_path):
    source = hf_copy("tiny_llama", lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].__setitem__(0, np.nan))
    with pytest.raises(ValueError, match="'layers_1/mlp/gate_up/kernel' holds NaN"):
        quantize_checkpoint(source, tmp_path / "out", "int8")
    assert [entry.name for entry in tmp_path.iterdir()] == [source.name]


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("int3", {}, "method='int3' must be one of int8"),
        ("int4", {"bits": 3}, "bits=3 is not supported with method='int4', which has 4"),
        ("int8", {"calibration": "builtin"}, "calibration='builtin' is of 'awq' and 'gptq'"),
        ("fp8", {"group_size": 64}, "group_size=64 is of 'int8' and 4-bit methods"),
        ("int4", {"group_size": 48}, "group_size=48 must be one of 32, 64, 128, 256"),
        ("nf4", {"group_size": -1}, "group_size=-1 must be one of 32, 64"),
        ("nf4", {"symmetric": True}, "symmetric=True is of 'int4' and 'gptq'"),
        ("awq", {"symmetric": True}, "symmetric=True is not supported with 'awq'"),
        ("awq", {"desc_act": True}, "desc_act=True is of 'gptq'"),
        ("awq", {"static_groups": True}, "static_groups=True is of 'gptq'"),
        ("gptq", {"static_groups": True, "desc_act": False}, "static_groups=True contradicts desc_act=False"),
        ("awq", {"damp_percent": 0.1}, "damp_percent=0.1 is of 'gptq'"),
        ("gptq", {"damp_percent": 1.5}, "damp_percent=1.5 must be between 0 and 1"),
        ("gptq", {"num_samples": 0}, "num_samples=0 must be at least 1"),
        ("gptq", {"quantize_head": True}, "quantize_head=True is not supported with 'gptq'"),
        ("int4", {"double_quant": True}, "double_quant=True is of 'nf4' and 'fp4'"),
        ("int8", {"max_shard_bytes": 0}, "max_shard_bytes=0 must be at least 1"),
    ],
    ids=str,
)
def test_bad_options_are_told_before_anything_is_read(method, options, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        quantize_checkpoint("nowhere", tmp_path / "out", method, **options)


@pytest.mark.parametrize(
    ("name", "method", "options", "message"),
    [
        (
            "tiny_llama",
            "int4",
            {"group_size": 64},
            "group_size=64 does not divide the 96 inputs of model.layers.0.mlp.dow",
        ),
        ("tiny_llama", "int4", {"dtype": "int8"}, "dtype='int8' must be"),
        ("tiny_llama", "awq", {"calibration": "/nowhere.txt"}, "nowhere.txt"),
        ("gpt2", "int8", {}, "gpt2 keeps its weights as [in, out] (transformer.h.0.attn.c_proj)"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_model_is_refused(name, method, options, message, data_dir, make_case, tmp_path):
    source = data_dir / name if name.startswith("tiny") else make_case(name).folder()
    with pytest.raises((ValueError, OSError), match=re.escape(message)):
        quantize_checkpoint(source, tmp_path / "out", method, **options)
    assert not (tmp_path / "out").exists()


def test_a_quantised_model_is_not_quantised_again(data_dir, tmp_path):
    quantize_checkpoint(data_dir / "tiny_llama", tmp_path / "once", "int8")
    with pytest.raises(ValueError, match="once is quantised already .*; give the model in floats"):
        quantize_checkpoint(tmp_path / "once", tmp_path / "twice", "int4")
