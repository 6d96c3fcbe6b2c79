"""Quantised checkpoints of AWQ and GPTQ: what is written is what the calibration found."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from jaxinfer.calibration.layer_result import CalibratedMethod
from jaxinfer.calibration.layerwise import quantise_layers
from jaxinfer.calibration.text import calibration_samples, calibration_text
from jaxinfer.checkpoint import load_params, open_checkpoint
from jaxinfer.checkpoint.leaf_shapes import flat
from jaxinfer.checkpoint.quantize import quantize_checkpoint
from jaxinfer.checkpoint.resumable_directory import Work
from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.quantize import dequantized

CALIBRATION = {"group_size": 32, "num_samples": 4, "seq_len": 64}


@pytest.mark.parametrize(("method", "options"), [("awq", {}), ("gptq", {"desc_act": True})])
def test_calibrated_methods_write_what_they_found(method, options, small_model, tmp_path, stored_params):
    done = quantize_checkpoint(small_model, tmp_path / "out", method, **CALIBRATION, **options)
    checkpoint = open_checkpoint(small_model)
    tree = load_params(checkpoint, "float32")
    layers = {f"layers_{i}": tree[f"layers_{i}"] for i in range(2)}
    results = list(
        quantise_layers(
            checkpoint.model_config,
            tree,
            lambda index: {f"layers_{index}/{path}": leaf for path, leaf in flat(layers[f"layers_{index}"]).items()},
            CalibratedMethod(method, group=32, symmetric=method == "gptq", act_order=bool(options)),
            calibration_samples(checkpoint.tokenizer(), calibration_text(), 4, 64),
        )
    )
    written = stored_params(tmp_path / "out")
    for result in results:
        for path, value in result.params.items():
            layer, module, *rest = path.split("/")
            found = written[layer][module]
            for name in rest:
                found = found[name]
            if not isinstance(value, QuantArray):
                np.testing.assert_array_equal(found, value)
                continue
            np.testing.assert_array_equal(dequantized(found), dequantized(value), err_msg=path)
            assert (found.order is not None) == bool(options)
    reports = [report for result in results for report in result.reports]
    assert [(one.error, one.rounded) for one in done.errors] == [(one.error, one.rounded) for one in reports]
    assert {one.path for one in done.errors} == {
        f"layers_{i}/{name}/kernel" for i in range(2) for name in ("attn/qkv", "attn/out", "mlp/gate_up", "mlp/down")
    }


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_stopped_in_the_middle_and_gone_on_with_it_is_the_same(method, small_model, tmp_path, monkeypatch):
    options = CALIBRATION
    whole = quantize_checkpoint(small_model, tmp_path / "whole", method, **options)
    assert not open_checkpoint(whole.path).layout.config().get("desc_act")  # groups of neighbours need none
    save = Work.save

    def stop(work, progress):
        save(work, progress)
        if progress["steps"] == 2:  # what is in no layer, and the first one
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Work, "save", stop)
        quantize_checkpoint(small_model, tmp_path / "out", method, **options)
    (left,) = tmp_path.glob(".out*")
    with pytest.raises(ValueError, match="not a model directory"):
        open_checkpoint(left)
    text = tmp_path / "text"
    text.write_text("Another text, of more than sixty-four bytes, which is what a sample needs here.")
    with pytest.raises(ValueError, match=r'another kind \(calibration text "'):
        quantize_checkpoint(small_model, tmp_path / "out", method, **options, calibration=text)
    again = quantize_checkpoint(small_model, tmp_path / "out", method, **options)
    contents = [{path.name: path.read_bytes() for path in done.path.rglob("*.*")} for done in (again, whole)]
    assert contents[0] == contents[1] and "model.safetensors" in contents[0]
    assert replace(again, path=whole.path) == whole
    assert not list(tmp_path.glob(".out*"))


def test_fewer_tokens_than_inputs_are_warned_of(small_model, tmp_path):
    """The widest matrix has 128 inputs."""
    sizes = {"group_size": 32, "num_samples": 3, "seq_len": 42}
    with pytest.warns(UserWarning, match=r"3 x 42 = 126 tokens are fewer than the 128 inputs .*--samples.*--seq-len"):
        quantize_checkpoint(small_model, tmp_path / "out", "gptq", **sizes)


def test_a_model_without_a_tokenizer_is_not_calibrated(small_model, tmp_path):
    folder = tmp_path / "in"
    shutil.copytree(small_model, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ValueError, match="'awq' runs a text .* its tokenizer: .*; add one; or use a"):
        quantize_checkpoint(folder, tmp_path / "out", "awq", **CALIBRATION)
    assert not (tmp_path / "out").exists()
