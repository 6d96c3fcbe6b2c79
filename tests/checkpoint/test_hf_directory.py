"""Hugging Face directories: shards, tying (field case 22), end ids (11), and everything that can be wrong with them."""

import json
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoint import load_params, open_checkpoint
from jaxinfer.checkpoint.load import stored_bytes

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def sharded(hf_copy):
    """tiny_llama in two shards; the second also holds a stale copy of a tensor that the index places in the first."""
    folder = hf_copy("tiny_llama")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for shard, members in parts.items():
        content = {name: tensors[name] for name in members}
        if shard.startswith("model-00002"):
            content[names[0]] = np.zeros_like(tensors[names[0]])
        save_file(content, folder / shard)
    index = {"weight_map": {name: shard for shard, members in parts.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_the_index_decides_which_shard_a_tensor_comes_from(sharded, data_dir):
    expected = load_params(open_checkpoint(data_dir / "tiny_llama"), "float32")
    jax.tree.map(np.testing.assert_array_equal, load_params(open_checkpoint(sharded), "float32"), expected)


def test_missing_shard(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is missing"):
        open_checkpoint(sharded)


def test_missing_index(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"2 safetensors shards but no model\.safetensors\.index\.json"):
        open_checkpoint(sharded)


def test_index_names_a_tensor_that_its_shard_lacks(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"00001-of-00002\.safetensors has no tensor 'model\.norm\.weight'"):
        open_checkpoint(sharded)


def test_index_that_points_out_of_the_directory(sharded):
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(ValueError, match="not a file of that directory"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_truncated_json(file, sharded):
    (sharded / file).write_text('{"architectures": ["Llam')
    with pytest.raises(ValueError, match=rf"{file} is corrupt or truncated"):
        open_checkpoint(sharded)


def test_truncated_safetensors_anywhere(hf_copy):
    folder = hf_copy("tiny_llama")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in [*range(0, 2600, 5), *range(3000, len(whole), 5003), len(whole) - 1]:
        path.write_bytes(whole[:length])
        start = time.monotonic()
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            open_checkpoint(folder)
        assert time.monotonic() - start < 5


def test_flipped_header_bytes_never_crash(hf_copy):
    folder = hf_copy("tiny_llama")
    path, rng = folder / "model.safetensors", np.random.default_rng(0)
    whole = path.read_bytes()
    for _ in range(300):
        data = bytearray(whole)
        for position in rng.integers(0, 1500, 2):
            data[position] = rng.integers(256)
        path.write_bytes(data)
        try:
            with warnings.catch_warnings(action="ignore"):
                open_checkpoint(folder)
        except ValueError as error:
            assert str(folder) in str(error)


def with_header(folder: Path, edit: Callable[[dict], None], tail: bytes = b"") -> Path:
    """The folder, its safetensors header edited and bytes put behind the data."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :] + tail)
    return folder


def test_overlong_offsets_name_the_tensor(hf_copy):
    folder = with_header(
        hf_copy("tiny_llama"), lambda header: header["model.norm.weight"].update(data_offsets=[2**60, 2**60 + 256])
    )
    with pytest.raises(ValueError, match=r"truncated: tensor 'model\.norm\.weight' ends at byte"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": ["F32"]},
        {"dtype": None},
        {"shape": [64.5]},
        {"shape": ["64"]},
        {"shape": [True]},
        {"shape": "64"},
        {"shape": {"64": 1}},
        {"data_offsets": [0.0, 256.0]},
        {"data_offsets": [0]},
        {"data_offsets": "01"},
    ],
    ids=str,
)
def test_header_entries_of_the_wrong_kind_name_file_and_tensor(fields, hf_copy):
    folder = with_header(hf_copy("tiny_llama"), lambda header: header["model.norm.weight"].update(fields))
    with pytest.raises(
        ValueError, match=r"safetensors is corrupt: the header entry of tensor 'model\.norm\.weight' is"
    ):
        open_checkpoint(folder)


def test_tensors_fill_the_data_from_end_to_end(hf_copy):
    def share(header):
        norms = "model.layers.0.input_layernorm.weight", "model.norm.weight"
        header[norms[1]]["data_offsets"] = header[norms[0]]["data_offsets"]

    folder = hf_copy("tiny_llama")
    whole = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"safetensors is corrupt: tensor '\S+' begins at byte \d+, but tensor '\S+'"):
        open_checkpoint(with_header(folder, share))
    (folder / "model.safetensors").write_bytes(whole)
    with pytest.raises(ValueError, match=r"safetensors is corrupt: its tensors end at byte \d+, the file at \d+"):
        open_checkpoint(with_header(folder, lambda header: None, tail=b"more"))
    (folder / "model.safetensors").write_bytes(whole)
    with pytest.raises(ValueError, match=r"safetensors is corrupt: (tensor '\S+' begins|its tensors end) at byte"):
        open_checkpoint(with_header(folder, lambda header: header.pop("model.norm.weight")))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("architectures", "LlamaForCausalLM", "must be a list of class names"),
        ("architectures", 3, "must be a list of class names"),
        ("architectures", ["GPT9"], "is not supported; supported architectures: LlamaForCausalLM"),
        ("quantization_config", "awq", "quantization_config='awq' must be a mapping"),
        ("hidden_size", 64.0, "hidden_size=64.0 must be an int"),
        ("num_key_value_heads", "2", "num_key_value_heads='2' must be an int"),
        ("rms_norm_eps", "small", "rms_norm_eps='small' must be a number"),
    ],
)
def test_settings_of_the_wrong_kind_name_file_and_key(hf_copy, key, value, message):
    folder = hf_copy("tiny_llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
        open_checkpoint(folder)


def test_gguf_beside_a_config_is_pointed_at(hf_copy):
    folder = hf_copy("tiny_llama")
    (folder / "model.safetensors").rename(folder / "model-Q8_0.gguf")
    with pytest.raises(ValueError, match=r"no \*\.safetensors file.* for its GGUF file give .*model-Q8_0\.gguf"):
        open_checkpoint(folder)


def test_pickle_files_are_refused(tmp_path, hf_copy):
    folder = hf_copy("tiny_llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle file"):
        open_checkpoint(folder)
    path = tmp_path / "consolidated.pth"
    path.write_bytes(b"\x80\x02")
    with pytest.raises(ValueError, match=r"consolidated\.pth is a pickle file"):
        open_checkpoint(path)


def test_not_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(ValueError, match="/dev/null is neither a file nor a folder"):
        open_checkpoint(Path("/dev/null"))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ValueError, match=r"config\.json: the model config has no 'hidden_size'"):
        open_checkpoint(tmp_path)


def test_missing_tensor(hf_copy):
    folder = hf_copy("tiny_llama", lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight \[96, 64\] missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize("rename", [lambda name: f"module.{name}", lambda name: name.removeprefix("model.")])
def test_other_names_are_shown_beside_those_that_are_missing(rename, hf_copy):
    def renamed(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[rename(name)] = tensors.pop(name)

    there = re.escape(rename("model.layers.0.input_layernorm.weight"))
    with pytest.raises(ValueError, match=rf"\[256, 64\].* missing .* Nobody reads what is there: {there} \[64\], "):
        open_checkpoint(hf_copy("tiny_llama", renamed))


def test_unexpected_tensor(hf_copy):
    folder = hf_copy("tiny_llama", lambda tensors: tensors.update(extra=np.zeros((3, 5), np.float32)))
    with pytest.raises(ValueError, match=r"tensor extra \[3, 5\] has no place"):
        open_checkpoint(folder)


def test_more_layers_in_the_file_than_in_the_config(hf_copy):
    with pytest.raises(ValueError, match=r"model\.layers\.1\.\S+ \[64\].*1 layers, llama"):
        open_checkpoint(hf_copy("tiny_llama", num_hidden_layers=1))


def test_misshapen_tensor(hf_copy):
    name = "model.layers.0.self_attn.k_proj.weight"
    folder = hf_copy("tiny_llama", lambda tensors: tensors.update({name: np.zeros((32, 64), np.float32)}))
    with pytest.raises(ValueError, match=r"k_proj\.weight is \[32, 64\] but the config says \[16, 64\]"):
        open_checkpoint(folder)


def test_rotary_buffers_of_old_checkpoints_are_skipped(hf_copy):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    open_checkpoint(hf_copy("tiny_llama", lambda tensors: tensors.update({name: np.zeros(4, np.float32)})))


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_, np.int64])
def test_masks_beside_the_weights_are_skipped_whatever_their_dtype(dtype, hf_copy):
    """Pythia's files hold the causal mask as bytes."""

    def with_a_mask(tensors: dict[str, np.ndarray]) -> None:
        tensors.update({name: tensor.astype(np.float32) for name, tensor in tensors.items()})
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones((400, 400), dtype)

    assert open_checkpoint(hf_copy("tiny_llama", with_a_mask, dtype=...)).dtype == "float32"  # masks do not count


def test_weights_of_a_dtype_that_is_not_read(hf_copy):
    name = "model.norm.weight"
    folder = hf_copy("tiny_llama", lambda tensors: tensors.update({name: tensors[name].astype(np.int8)}))
    with pytest.raises(
        ValueError, match=rf"tensor '{name}' has dtype I8, not one of the supported F64, F32, F16, BF16"
    ):
        open_checkpoint(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"dtype":"I8"', b'"dtype":"X8"'))
    with pytest.raises(ValueError, match=rf"tensor '{name}' has the unknown dtype X8"):
        open_checkpoint(folder)


def test_tied_and_an_identical_head(hf_copy, data_dir):
    folder = hf_copy("tiny_llama_tied", lambda tensors: tensors.update({HEAD: tensors[EMBEDDING]}))
    checkpoint = open_checkpoint(folder)
    params = load_params(checkpoint, "float32")
    assert "lm_head" not in params
    assert stored_bytes(checkpoint) == stored_bytes(open_checkpoint(data_dir / "tiny_llama_tied"))  # counted once
    expected = load_params(open_checkpoint(data_dir / "tiny_llama_tied"), "float32")
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_tied_and_a_different_head_ties_with_a_warning(hf_copy):
    folder = hf_copy("tiny_llama_tied", lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] + 1}))
    checkpoint = open_checkpoint(folder)
    with pytest.warns(UserWarning, match=r"'lm_head\.weight' differs from the embedding"):
        assert "lm_head" not in load_params(checkpoint, "float32")


def test_tied_and_a_placeholder_head(hf_copy):
    folder = hf_copy("tiny_llama_tied", lambda tensors: tensors.update({HEAD: np.zeros((0,), np.float32)}))
    load_params(open_checkpoint(folder), "float32")


@pytest.mark.parametrize("flag", [False, None, ...], ids=["false", "null", "absent"])
def test_untied_and_no_head_names_it(flag, hf_copy):
    with pytest.raises(ValueError, match=r"lm_head\.weight \[256, 64\] missing"):
        open_checkpoint(hf_copy("tiny_llama_tied", tie_word_embeddings=flag))


def test_untied_and_a_placeholder_head_names_it(hf_copy):
    folder = hf_copy("tiny_llama", lambda tensors: tensors.update({HEAD: np.zeros((0,), np.float32)}))
    with pytest.raises(ValueError, match=r"lm_head\.weight \[256, 64\] missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize("in_config", [2, 0, [0, 2], None, ...], ids=str)
@pytest.mark.parametrize("in_generation", [..., 0, [2, 5], None, "no file"], ids=str)
def test_end_ids_are_the_union(in_config, in_generation, hf_copy):
    folder = hf_copy("tiny_llama", eos_token_id=in_config)
    if in_generation != "no file":
        fields = {} if in_generation is ... else {"eos_token_id": in_generation}
        (folder / "generation_config.json").write_text(json.dumps(fields))
    ids = {2: {2}, 0: {0}, None: set()}
    left = {0, 2} if isinstance(in_config, list) else ids.get(in_config, set())
    right = {2, 5} if isinstance(in_generation, list) else ids.get(in_generation, set())
    assert open_checkpoint(folder).eos_token_ids == left | right


def test_end_id_that_is_none(hf_copy):
    with pytest.raises(ValueError, match=r"config\.json: eos_token_id='</s>' must be a token id"):
        open_checkpoint(hf_copy("tiny_llama", eos_token_id="</s>"))


def test_generation_config(hf_copy):
    folder = hf_copy("tiny_llama")
    assert open_checkpoint(folder).generation_config == {}
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "top_k": 5}))
    assert open_checkpoint(folder).generation_config == {"temperature": 0.3, "top_k": 5}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": ..., "torch_dtype": "float16"}, "float16"),
        ({"dtype": ..., "torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": None}, "bfloat16"),  # what most of its values have
    ],
    ids=str,
)
def test_stored_dtype(fields, expected, hf_copy):
    def mostly_bfloat16(tensors: dict[str, np.ndarray]) -> None:
        tensors[EMBEDDING] = tensors[EMBEDDING].astype(ml_dtypes.bfloat16)

    assert open_checkpoint(hf_copy("tiny_llama", mostly_bfloat16, **fields)).dtype == expected


def test_no_weight_is_read_before_the_whole_checkpoint_is_checked(hf_copy, monkeypatch):
    folder = hf_copy("tiny_llama_tied", lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] + 1}))
    monkeypatch.setattr(np, "memmap", None)
    assert isinstance(open_checkpoint(folder).path, Path)


def test_tokenizer_of_a_directory(hf_copy, byte_tokenizer_json):
    folder = hf_copy("tiny_llama")
    (folder / "tokenizer.json").write_text(byte_tokenizer_json)
    tokenizer = open_checkpoint(folder).tokenizer()
    assert tokenizer.encode("hé") == list("hé".encode())
