"""Safetensors files in Hugging Face's names, read back by the safetensors library."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxinfer.checkpoint import load_params, open_checkpoint
from jaxinfer.checkpoint.convert import convert_checkpoint
from jaxinfer.checkpoint.hf_export import exported_config
from jaxinfer.checkpoint.leaf_shapes import leaf_shapes
from jaxinfer.checkpoint.load import read_leaves
from jaxinfer.checkpoint.save import write_safetensors

MODELS = ("tiny_llama", "tiny_llama_tied", "tiny_qwen2")
pytestmark = pytest.mark.filterwarnings("ignore:no tokenizer is written")


def all_tensors(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", MODELS)
def test_tensors_are_those_of_the_original(name, data_dir, tmp_path):
    convert_checkpoint(data_dir / name, tmp_path / "out", "safetensors", dtype="float32")
    original, written = all_tensors(data_dir / name), all_tensors(tmp_path / "out")
    assert set(original) == set(written)
    for key, tensor in original.items():
        assert written[key].dtype == np.float32
        np.testing.assert_array_equal(written[key], tensor.astype(np.float32), err_msg=key)


def test_every_familys_tensors_come_back(family_case, tmp_path):
    """Bit for bit, whatever was fused, transposed, paired or an expert's own; in several shards."""
    source, out = family_case.folder(), tmp_path / "out"
    convert_checkpoint(source, out, "safetensors", max_shard_bytes=40_000)
    original, written = all_tensors(source), all_tensors(out)
    assert len(list(out.glob("*.safetensors"))) > 1
    assert {name: tensor.shape for name, tensor in written.items()} == {n: t.shape for n, t in original.items()}
    for name, tensor in original.items():
        assert written[name].tobytes() == tensor.tobytes(), name
    before, after = open_checkpoint(source), open_checkpoint(out)
    assert (after.family, after.model_config) == (before.family, before.model_config)
    jax.tree.map(np.testing.assert_array_equal, load_params(after, "float32"), load_params(before, "float32"))


@pytest.mark.parametrize("limit", [1, 5000, 30000, 10**9])
def test_shards_hold_no_more_than_they_may(limit, data_dir, tmp_path):
    convert_checkpoint(data_dir / "tiny_llama", tmp_path / "out", "safetensors", max_shard_bytes=limit)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    written = all_tensors(tmp_path / "out")
    assert set(written) == set(all_tensors(data_dir / "tiny_llama"))
    for file in files:
        tensors = load_file(file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= limit or len(tensors) == 1
    if len(files) == 1:
        assert files[0].name == "model.safetensors"
        return
    assert [file.name for file in files] == [
        f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))
    ]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in written.values())
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
    assert open_checkpoint(tmp_path / "out").model_config == open_checkpoint(data_dir / "tiny_llama").model_config


def test_data_begins_at_a_multiple_of_8(data_dir, tmp_path):
    convert_checkpoint(data_dir / "tiny_llama", tmp_path / "out", "safetensors")
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert int.from_bytes(data[:8], "little") % 8 == 0
    assert json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"] == {"format": "pt"}


def write(folder, checkpoint, stream, leaves):
    family, _ = exported_config(checkpoint)
    config = checkpoint.model_config
    write_safetensors(folder, family, config, "float32", stream, leaves=leaves, max_shard_bytes=10**9)


def test_what_the_stream_lacks_or_has_beside_is_an_error(data_dir, tmp_path):
    checkpoint = open_checkpoint(data_dir / "tiny_llama")
    leaves = list(leaf_shapes(checkpoint.model_config, "float32"))
    values = list(read_leaves(checkpoint, "float32"))
    assert leaves[-1] == "lm_head/kernel"
    with pytest.raises(ValueError, match=r"tensor 'lm_head\.weight' was not written"):
        write(tmp_path, checkpoint, values[:-1], leaves)
    with pytest.raises(ValueError, match="parameter 'wings' and the weight table of llama do not fit"):
        write(tmp_path, checkpoint, values, [*leaves, "wings"])
    with pytest.raises(ValueError, match=r"comes where 'model\.embed_tokens\.weight' was planned"):
        write(tmp_path, checkpoint, reversed(values), leaves)
