"""Checkpoints of compressed-tensors, bitsandbytes and fp8 load, with the logits that those packages give."""

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxinfer.checkpoint import load_params, open_checkpoint
from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.quant.array import QuantArray, dequantize
from jaxinfer.quant.plan import QuantPlan
from jaxinfer.quant.storage import Storage
from jaxinfer.startup.quantization import QuantOptions, quant_plan

FORMATS = {
    "ct_w4a16": {"int4 in groups of 32"},
    "ct_mixed": {"int4 in groups of 32, asymmetric", "int8 per output channel, asymmetric"},
    "ct_w8a8": {"int8 per output channel"},
    "ct_fp8": {"fp8 per output channel"},
    "ct_fp8_static": {"fp8 per output channel"},
    "bnb_int8": {"int8 per output channel"},
    "bnb_nf4": {"nf4 per output channel", "nf4 in groups of 64"},
    "bnb_fp4": {"fp4 per output channel", "fp4 in groups of 64"},
    "fp8_block": {"fp8 per output channel", "fp8 in groups of 64"},
}
"""Name -> the formats of its matrices, apart from what activations are rounded to."""

DTYPES = {"F32": np.float32, "F16": np.float16, "I32": np.int32, "I64": np.int64, "I8": np.int8, "U8": np.uint8}


def opened(data_dir: Path, name: str) -> Checkpoint:
    static = pytest.warns(UserWarning, match="a scale for each token in place of the checkpoint's static ones")
    with static if name.endswith("static") else contextlib.nullcontext():
        return open_checkpoint(data_dir / "quantised" / name)


def plan_of(checkpoint: Checkpoint, **options: Any) -> QuantPlan:
    plan = quant_plan(None, QuantOptions(**options), checkpoint.model_config, checkpoint, "cpu")
    assert plan is not None
    return plan


def in_floats(params: Any, chosen: Callable[[QuantArray], bool]) -> Any:
    """The parameters with some of the quantised ones dequantised."""
    return jax.tree.map(
        lambda leaf: dequantize(leaf) if isinstance(leaf, QuantArray) and chosen(leaf) else leaf,
        params,
        is_leaf=lambda leaf: isinstance(leaf, QuantArray),
    )


@pytest.mark.parametrize("name", FORMATS)
def test_logits_of_the_codes_and_scales_are_the_packages(name, data_dir, reference, all_logits):
    """Both multiply float32 activations with the same dequantised weights: all that differs is the order of sums.
    Plain int8 is dequantised before the products here, because a CPU may round activations for it to 15 bits."""
    checkpoint, expected = opened(data_dir, name), reference(f"quantised/{name}")
    plan = plan_of(checkpoint, fast_form=False)
    exact = {path: replace(storage, act_bits=16) for path, storage in plan.kept.items()}
    assert {str(storage) for storage in exact.values()} == FORMATS[name]
    assert len(exact) == 4 * checkpoint.model_config.num_hidden_layers
    params = load_params(checkpoint, "float32", plan=replace(plan, kept=exact))
    params = in_floats(params, lambda array: array.codes.dtype == np.int8)
    logits = all_logits(checkpoint.model_config, params, expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=1e-4, atol=1e-4)


def test_w8a8_rounds_activations_as_well_as_the_package(data_dir, reference, all_logits):
    """It rounds to 255 levels where the package has 256, so that the logits cannot be the same: their mean distance
    from those of exact activations is that of the package's own, or less."""
    checkpoint, expected = opened(data_dir, "ct_w8a8"), reference("quantised/ct_w8a8")
    plan = plan_of(checkpoint)
    assert set(plan.kept.values()) == {Storage("int8", act_bits=8)}  # the CPU's fast form: taken over code by code
    logits = all_logits(checkpoint.model_config, load_params(checkpoint, "float32", plan=plan), expected["tokens"])
    off = np.abs(logits - expected["logits"]).mean()
    assert 0.001 < off <= 1.1 * np.abs(expected["rounded_logits"] - expected["logits"]).mean()


@pytest.mark.parametrize("name", ["ct_mixed", "bnb_nf4", "fp8_block"])
def test_without_a_plan_weights_are_dequantised(name, data_dir):
    checkpoint = opened(data_dir, name)
    floats = load_params(checkpoint, "float32")
    stored = load_params(checkpoint, "float32", plan=plan_of(checkpoint, fast_form=False))
    whole = in_floats(stored, lambda array: True)
    jax.tree.map(lambda left, right: np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-7), whole, floats)


@pytest.mark.parametrize(
    ("name", "suffix", "change", "message"),
    [
        ("ct_w4a16", "weight_scale", lambda a: a * np.nan, "weight_scale holds NaN or infinity"),
        ("ct_w4a16", "weight_scale", lambda a: np.full_like(a, 3e38), "weight_scale holds .* is beyond float32"),
        ("ct_mixed", "weight_scale", lambda a: np.full_like(a, 3e38), "weight_scale holds .* is beyond float32"),
        ("ct_w4a16", "weight_shape", lambda a: a + 1, r"weight_shape is \[65, 65\] where the model has \[64, 64\]"),
        ("bnb_int8", "SCB", lambda a: a / 0, "SCB holds NaN or infinity"),
        ("bnb_int8", "weight_format", lambda a: a + 2, "weight_format is 2"),
        ("bnb_nf4", "weight.nested_absmax", lambda a: a * np.inf, "weight.nested_absmax holds NaN"),
        ("bnb_fp4", "weight.quant_state.bitsandbytes__fp4", lambda a: a[:-1], "not the JSON of a quant state"),
        ("fp8_block", "weight_scale_inv", lambda a: a * np.inf, "weight_scale_inv holds NaN or infinity"),
    ],
)
def test_impossible_values_are_refused_by_module_and_tensor(name, suffix, change, message, data_dir, tmp_path):
    folder = broken(data_dir / "quantised" / name, tmp_path, suffix, change)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(ValueError, match=rf"model\.layers\.0\.self_attn\.q_proj'.*{message}"):
        load_params(checkpoint, "float32", plan=plan_of(checkpoint))


@pytest.mark.parametrize(
    ("name", "suffix", "change", "message"),
    [
        ("ct_w4a16", "weight_packed", lambda a: a[:, :-1], r"q_proj.weight_packed is int32\[64, 7\] but .*\[64, 8\]"),
        ("ct_w4a16", "weight_scale", None, r"q_proj.weight_scale \[64, 2\] missing"),
        ("bnb_int8", "SCB", lambda a: a.astype(np.float16), r"q_proj.SCB is float16\[64\]"),
        ("bnb_nf4", "weight.absmax", lambda a: a[:-1], "weight.absmax has 63 scales for 4096 values"),
        ("fp8_block", "weight_scale_inv", lambda a: a.repeat(2), r"weight_scale_inv is float32\[2\] but"),
    ],
)
def test_wrong_shapes_are_refused_before_a_weight_is_read(name, suffix, change, message, data_dir, tmp_path):
    folder = broken(data_dir / "quantised" / name, tmp_path, suffix, change)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(folder)


def test_scales_of_a_kv_cache_are_left_out(data_dir, tmp_path):
    """In a second file, which the index names."""
    shutil.copytree(data_dir / "quantised" / "fp8_block", tmp_path / "copy")
    with safe_open(tmp_path / "copy" / "model.safetensors", "np") as file:
        places = dict.fromkeys(file.keys(), "model.safetensors")
    scales = {f"model.layers.0.self_attn.{name}_scale": np.ones(1, np.float32) for name in "kv"}
    save_file(scales, tmp_path / "copy" / "scales.safetensors")
    places |= dict.fromkeys(scales, "scales.safetensors")
    (tmp_path / "copy" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    whole = load_params(open_checkpoint(data_dir / "quantised" / "fp8_block"), "float32")
    jax.tree.map(np.testing.assert_array_equal, whole, load_params(open_checkpoint(tmp_path / "copy"), "float32"))


def test_unsupported_settings_are_refused_by_name(data_dir, tmp_path):
    shutil.copytree(data_dir / "quantised" / "ct_w4a16", tmp_path / "copy")
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 2
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config))
    (tmp_path / "copy" / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(ValueError, match=r"config\.json: .*'group_0' has weights of num_bits=2 and type='int'"):
        open_checkpoint(tmp_path / "copy")


def broken(source: Path, parent: Path, suffix: str, change: Any) -> Path:
    """A copy with one tensor of the first query projection changed, or taken out."""
    folder = parent / "copy"
    shutil.copytree(source, folder)
    raw = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    header.pop("__metadata__")
    parts = {name: data[slice(*entry["data_offsets"])] for name, entry in header.items()}
    name = f"model.layers.0.self_attn.q_proj.{suffix}"
    entry, values = header.pop(name), parts.pop(name)
    if change is not None:
        with np.errstate(divide="ignore"):
            changed = change(np.frombuffer(values, DTYPES[entry["dtype"]]).reshape(entry["shape"]))
        dtype = next(key for key, dtype in DTYPES.items() if dtype == changed.dtype)
        header[name], parts[name] = {"dtype": dtype, "shape": changed.shape}, changed.tobytes()
    start = 0
    for name, entry in header.items():
        entry["data_offsets"] = [start, start := start + len(parts[name])]
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(parts[name] for name in header)
    )
    return folder
