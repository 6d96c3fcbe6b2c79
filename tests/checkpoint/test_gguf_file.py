"""GGUF files on their own: values against the gguf package's reader, and files that are broken (field case 13)."""

import struct
import time
import warnings
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxinfer.checkpoint import load_params, open_checkpoint
from jaxinfer.checkpoint.gguf import read_gguf
from jaxinfer.checkpoint.hf_export import exported_config
from jaxinfer.models.rope_scaling import RopeScaling

KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


@pytest.fixture
def every_kind(tmp_path: Path) -> Path:
    """A file with one `[20, 512]` tensor of each kind, and metadata of each type."""
    rng, path = np.random.default_rng(0), tmp_path / "kinds.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind in KINDS:
        qtype = gguf.GGMLQuantizationType[kind]
        block, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
        if kind == "F32":
            data = rng.standard_normal((20, 512)).astype(np.float32)
        else:
            data = rng.integers(0, 60, (20, 512 // block * block_bytes), dtype=np.uint8)  # bytes < 60: no NaN scales
        writer.add_tensor(f"{kind}.weight", data, raw_dtype=qtype)
    writer.add_uint8("a.u8", 200)
    writer.add_int64("a.i64", -(2**40))
    writer.add_bool("a.bool", True)
    writer.add_float64("a.f64", 0.1)
    writer.add_string("a.text", "naïve 😀")
    writer.add_array("a.words", ["x", "", "Ġy"])
    writer.add_array("a.numbers", [3, -4, 5])
    writer.add_array("a.empty_text", [""])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_values_equal_the_packages(every_kind):
    file = read_gguf(every_kind)
    for theirs in gguf.GGUFReader(every_kind).tensors:
        expected = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
        ours = file.tensors[theirs.name]
        assert ours.shape == (20, 512)
        np.testing.assert_array_equal(ours.rows(0, 20).astype(np.float32), expected)
        np.testing.assert_array_equal(ours.rows(7, 9).astype(np.float32), expected[7:9])


def test_metadata_equals_the_packages(every_kind):
    fields = gguf.GGUFReader(every_kind).fields
    expected = {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}
    assert read_gguf(every_kind).metadata == expected


def test_truncated_anywhere_is_an_error_that_names_the_file(gguf_twin, tmp_path):
    whole = gguf_twin("tiny_llama", "Q8_0").read_bytes()
    broken = tmp_path / "broken.gguf"
    # Only zero padding of the last tensor may be missing.
    for length in [*range(0, 3000, 7), *range(3000, len(whole) - 40, 4001), len(whole) - 40]:
        broken.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"broken\.gguf"):
            open_checkpoint(broken)


def test_flipped_header_bytes_never_hang_or_crash(gguf_twin, tmp_path):
    whole = gguf_twin("tiny_llama", "Q8_0").read_bytes()
    header, rng, broken = whole.index(b"blk.1.ffn_up"), np.random.default_rng(0), tmp_path / "broken.gguf"
    for _ in range(300):
        data = bytearray(whole)
        for position in rng.integers(0, header, 3):
            data[position] = rng.integers(256)
        broken.write_bytes(data)
        start = time.monotonic()
        try:
            with warnings.catch_warnings(action="ignore"):
                open_checkpoint(broken)
        except ValueError as error:
            assert "broken.gguf" in str(error)
        assert time.monotonic() - start < 5


def test_wrong_magic(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ValueError, match=r"model\.gguf is not a GGUF file: it starts with b'GGML'"):
        open_checkpoint(path)


@pytest.mark.parametrize(("version", "why"), [(1, "convert it again"), (3 << 24, "big-endian")])
def test_unsupported_version(version, why, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", version) + bytes(100))
    with pytest.raises(ValueError, match=why):
        open_checkpoint(path)


def test_offset_past_the_end_names_the_tensor(gguf_twin):
    path = gguf_twin("tiny_llama")
    data = bytearray(path.read_bytes())
    name = b"blk.1.ffn_down.weight"
    offset_at = data.index(name) + len(name) + 4 + 2 * 8 + 4
    data[offset_at : offset_at + 8] = struct.pack("<Q", 1 << 60)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"blk\.1\.ffn_down\.weight.* ends at byte"):
        open_checkpoint(path)


def test_stored_dtype_and_end_ids(gguf_twin):
    assert open_checkpoint(gguf_twin("tiny_llama", "F16")).dtype == "float16"
    assert open_checkpoint(gguf_twin("tiny_llama", "F32")).dtype == "float32"
    checkpoint = open_checkpoint(gguf_twin("tiny_llama", "Q4_0", metadata={"tokenizer.ggml.eot_token_id": 0}))
    assert checkpoint.dtype == "bfloat16"
    assert checkpoint.eos_token_ids == {0, 2}


def test_a_directory_with_one_gguf_file(gguf_twin):
    path = gguf_twin("tiny_qwen2")
    assert open_checkpoint(path.parent).path == path
    gguf_twin("tiny_llama")
    with pytest.raises(ValueError, match=r"several GGUF files; give one of them: tiny_llama-F32.gguf, tiny_qwen2-F32"):
        open_checkpoint(path.parent)


def test_unsupported_settings_are_refused_by_name(gguf_twin):
    for name, key, value in (
        ("tiny_llama", "llama.rope.dimension_count", 4),
        ("tiny_qwen2", "qwen2.expert_count", 8),
        ("tiny_llama", "split.count", 3),
    ):
        path = gguf_twin(name, metadata={key: value})
        with pytest.raises(ValueError, match=rf"{key}={value}|one of {value} parts"):
            open_checkpoint(path)


def test_a_llama_with_experts_is_a_mixtral(gguf_twin):
    path = gguf_twin("tiny_llama", metadata={"llama.expert_count": 8, "llama.expert_used_count": 2})
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_gate_inp\.weight \[8, 64\].* missing .*not a mixtral model"):
        open_checkpoint(path)


def test_unknown_setting_is_reported(gguf_twin):
    path = gguf_twin("tiny_llama", metadata={"llama.attention.sliding_window": 64})
    with pytest.warns(UserWarning, match=r"llama\.attention\.sliding_window"):
        open_checkpoint(path)


def test_unexpected_tensor_is_refused(gguf_twin):
    path = gguf_twin("tiny_llama", extra={"blk.0.ffn_gate_inp.weight": np.zeros((4, 64))})
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_gate_inp\.weight \[4, 64\]"):
        open_checkpoint(path)


def test_a_file_cut_after_opening(gguf_twin):
    path = gguf_twin("tiny_llama")
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ValueError, match=r"tiny_llama-F32\.gguf changed while it was read, at tensor"):
        load_params(checkpoint, "float32")


@pytest.mark.parametrize(("theta", "factor"), [(5e5, 8.0), (5e5, 32.0)], ids=["llama-3.1", "llama-3.2"])
def test_llama_3s_divisors_are_the_scaling_that_they_were_computed_from(theta, factor, gguf_twin):
    """In float32, as llama.cpp's converter does it; so that a config.json can say it (field case 13c)."""
    wavelengths = 2 * np.pi * np.float32(theta) ** (np.arange(0, 8, 2, dtype=np.float32) / np.float32(8))
    smooth = ((8192 / wavelengths - 1) / 3).clip(0, 1)
    divisors = (1 / ((1 - smooth) / np.float32(factor) + smooth)).astype(np.float32)
    assert 1 < divisors[2] < factor == divisors[3]
    write = partial(gguf_twin, "tiny_llama", metadata={"llama.rope.freq_base": theta})
    checkpoint = open_checkpoint(write(extra={"rope_freqs.weight": divisors}))
    assert checkpoint.model_config.rope_freq_factors is None
    assert checkpoint.model_config.rope_scaling == RopeScaling("llama3", 8192, factor)
    _, config = exported_config(checkpoint)
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    divisors[2] *= 1.001
    other = open_checkpoint(write(extra={"rope_freqs.weight": divisors}))
    assert other.model_config.rope_freq_factors == tuple(map(float, divisors))
    with pytest.raises(ValueError, match="would lose rope_freq_factors"):
        exported_config(other)
