"""Loading: memory, progress, dtype choice."""

import json
import struct
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxinfer.checkpoint import load, load_params, open_checkpoint, resolve_dtype
from jaxinfer.models.families.llama import LLAMA

# 604 MB of float32 weights, the embedding (131 MB) being the largest.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 7,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}

# Prints the growth of the peak resident size over the process with a started backend, and the bytes loaded.
MEASURE = """
import sys, jax
from pathlib import Path
def status(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) * 1024
jax.block_until_ready(jax.numpy.zeros(8))
before = status("VmRSS")
from jaxinfer.checkpoint import load, load_params, open_checkpoint
params = load_params(open_checkpoint(Path(sys.argv[1])), "float32")
print(status("VmHWM") - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


def write_zeros(folder: Path, stored: str) -> None:
    """A checkpoint of zeros: a sparse file that reads like any other."""
    itemsize = {"F32": 4, "BF16": 2}[stored]
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config, header, end = LLAMA.model_config(CONFIG), {}, 0
    for weight in LLAMA.weights:
        names = [weight.hf.format(i=i) for i in range(7)] if "{i}" in weight.hf else [weight.hf]
        for name in names if weight.when(config) else ():
            rows, *columns = weight.tensor_shape(config)
            start, end = end, end + rows * (columns[0] if columns else 1) * itemsize
            header[name] = {"dtype": stored, "shape": [rows, *columns], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from Linux's /proc")
@pytest.mark.parametrize("stored", ["F32", "BF16"])
def test_peak_memory_is_weights_plus_largest_tensor_plus_300_mb(stored, tmp_path):
    write_zeros(tmp_path, stored)
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    growth, loaded = map(int, printed.stdout.split())
    assert loaded > 590e6
    assert growth < loaded + 32000 * 1024 * 4 + 300e6


def test_progress_bar(data_dir, capsys):
    checkpoint = open_checkpoint(data_dir / "tiny_llama")
    load_params(checkpoint, "float32")
    assert capsys.readouterr().err == ""
    load_params(checkpoint, "float32", progress=True)
    assert "Loading weights: 100%" in capsys.readouterr().err


def test_parameters_stay_when_the_file_goes(hf_copy):
    folder = hf_copy("tiny_llama")
    params = load_params(open_checkpoint(folder), "float32", device=jax.devices()[0])
    before = float(params["embed"]["embedding"].sum())
    (folder / "model.safetensors").write_bytes(b"")
    assert float(params["embed"]["embedding"].sum()) == before


@pytest.mark.parametrize(
    ("dtype", "stored", "platform", "expected"),
    [
        ("auto", "bfloat16", "cpu", "float32"),
        ("auto", "bfloat16", "gpu", "bfloat16"),
        ("auto", "float32", "gpu", "float32"),
        ("float16", "bfloat16", "cpu", "float16"),
        ("half", "bfloat16", "gpu", "float16"),
        ("float", "bfloat16", "gpu", "float32"),
    ],
)
def test_resolve_dtype(dtype, stored, platform, expected):
    assert resolve_dtype(dtype, stored, platform) == expected


def test_resolve_dtype_refuses_others():
    with pytest.raises(ValueError, match="dtype='int8' must be 'auto', 'float32', 'bfloat16' or 'float16'"):
        resolve_dtype("int8", "float32", "cpu")


@pytest.mark.parametrize("chunk", [1, 700, 5000])
def test_reading_in_chunks_changes_nothing(chunk, gguf_twin, hf_copy, monkeypatch):
    def head(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    for path in (gguf_twin("tiny_llama", "Q8_0"), hf_copy("tiny_llama_tied", head)):
        expected = load_params(open_checkpoint(path), "float32")
        with monkeypatch.context() as patch:
            patch.setattr(load, "CHUNK_VALUES", chunk)
            chunked = load_params(open_checkpoint(path), "float32")
        jax.tree.map(np.testing.assert_array_equal, chunked, expected)


def test_a_large_file_with_a_wrong_config_fails_at_once(tmp_path):
    write_zeros(tmp_path, "F32")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 4097}))
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"gate_proj\.weight is \[4096, 1024\] but the config says \[4097, 1024\]"):
        open_checkpoint(tmp_path)
    assert time.monotonic() - start < 5
