"""Converting: every source to every format gives the reference's logits and the same tokens; killed, nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxinfer.checkpoint import load_checkpoint, load_params, open_checkpoint
from jaxinfer.checkpoint.convert import convert_checkpoint

MODELS = ("tiny_llama", "tiny_llama_tied", "tiny_qwen2")
FORMATS = ("safetensors", "orbax")
pytestmark = pytest.mark.filterwarnings("ignore:no tokenizer is written")


def same(left, right) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_references(name, format, data_dir, tmp_path, reference, all_logits):
    done = convert_checkpoint(data_dir / name, tmp_path / "out", format, dtype="float32")
    params, config = load_checkpoint(tmp_path / "out")
    assert config == open_checkpoint(data_dir / name).model_config
    assert done.num_params == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert done.nbytes == 4 * done.num_params
    expected = reference(name)
    np.testing.assert_allclose(all_logits(config, params, expected["tokens"]), expected["logits"], atol=1e-4)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("name", "kind"), [("tiny_llama", "Q8_0"), ("tiny_qwen2", "F16"), ("tiny_llama_tied", "F32")])
def test_gguf_files_keep_their_values(name, kind, format, gguf_twin, tmp_path):
    source = gguf_twin(name, kind)
    convert_checkpoint(source, tmp_path / "out", format, dtype="float32")
    original, written = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert written.model_config == original.model_config
    assert written.eos_token_ids == original.eos_token_ids
    same(load_params(written, "float32"), load_params(original, "float32"))


def test_there_and_back_through_both_formats(data_dir, tmp_path):
    convert_checkpoint(data_dir / "tiny_qwen2", tmp_path / "a", "orbax")
    convert_checkpoint(tmp_path / "a", tmp_path / "b", "safetensors")
    convert_checkpoint(tmp_path / "b", tmp_path / "c", "orbax")
    original, back = open_checkpoint(data_dir / "tiny_qwen2"), open_checkpoint(tmp_path / "c")
    for folder in "abc":
        same(load_checkpoint(tmp_path / folder)[0], load_params(original, original.dtype))
    assert back.hf_config == original.hf_config
    assert (back.generation_config, back.eos_token_ids) == (original.generation_config, original.eos_token_ids)
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == original.hf_config


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", "float32"), ("bfloat16", "bfloat16"), ("half", "float16"), ("float", "float32")],
)
def test_dtype(dtype, expected, format, data_dir, tmp_path):
    assert convert_checkpoint(data_dir / "tiny_llama", tmp_path / "out", format, dtype=dtype).dtype == expected
    assert open_checkpoint(tmp_path / "out").dtype == expected
    params, _ = load_checkpoint(tmp_path / "out")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {expected}
    same(params, load_params(open_checkpoint(data_dir / "tiny_llama"), expected))


def test_torch_dtype_is_kept_up_to_date_where_a_config_has_it(hf_copy, tmp_path):
    source = hf_copy("tiny_llama", dtype=..., torch_dtype="float32")
    convert_checkpoint(source, tmp_path / "out", "safetensors", dtype="bfloat16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and "dtype" not in config


@pytest.mark.parametrize("format", FORMATS)
def test_files_beside_the_weights_come_along(format, hf_copy, byte_tokenizer_json, tmp_path):
    source = hf_copy("tiny_llama", eos_token_id=[2, 9])
    files = {
        "tokenizer.json": byte_tokenizer_json,
        "tokenizer_config.json": '{"eos_token": "</s>"}',
        "special_tokens_map.json": '{"bos_token": "<s>"}',
        "chat_template.jinja": "{{ messages[0]['content'] }}!",
    }
    for name, text in files.items():
        (source / name).write_text(text)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (source / "generation_config.json").write_text('{"temperature": 0.3, "eos_token_id": 11}')
    assert convert_checkpoint(source, tmp_path / "out", format).tokenizer
    for name, text in {**files, "additional_chat_templates/tool_use.jinja": "tools"}.items():
        assert (tmp_path / "out" / name).read_text() == text
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.generation_config == {"temperature": 0.3, "eos_token_id": 11}
    assert checkpoint.eos_token_ids == {2, 9, 11}
    tokenizer = checkpoint.tokenizer()
    assert tokenizer.encode("hé</s>") == [*"hé".encode(), 257]
    assert tokenizer.bos_token_id == 256
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x!"


@pytest.mark.filterwarnings("default:no tokenizer is written")
def test_a_model_without_a_tokenizer_is_converted_with_a_warning(data_dir, tmp_path):
    with pytest.warns(UserWarning, match="no tokenizer is written: .*neither tokenizer.json nor tokenizer.model"):
        done = convert_checkpoint(data_dir / "tiny_llama", tmp_path / "out", "safetensors")
    assert not done.tokenizer


def test_what_hugging_face_cannot_say_goes_to_orbax_only(gguf_twin, tmp_path):
    source = gguf_twin("tiny_llama", extra={"rope_freqs.weight": np.array([1.0, 1.0, 2.0, 8.0])})
    with pytest.raises(ValueError, match="would lose rope_freq_factors. The format 'orbax' keeps it"):
        convert_checkpoint(source, tmp_path / "out", "safetensors")
    assert not (tmp_path / "out").exists()
    convert_checkpoint(source, tmp_path / "out", "orbax")
    assert load_checkpoint(tmp_path / "out")[1].rope_freq_factors == (1.0, 1.0, 2.0, 8.0)
    with pytest.raises(ValueError, match="would lose rope_freq_factors"):
        convert_checkpoint(tmp_path / "out", tmp_path / "again", "safetensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "pickle"}, "format='pickle' must be 'safetensors' or 'orbax'"),
        ({"dtype": "int8"}, "dtype='int8' must be"),
        ({"max_shard_bytes": 0}, "max_shard_bytes=0 must be at least 1"),
        ({"model": "nowhere"}, "nowhere does not exist"),
    ],
    ids=str,
)
def test_bad_arguments(options, message, data_dir, tmp_path):
    arguments = {"model": data_dir / "tiny_llama", "output": tmp_path / "out", "format": "orbax", **options}
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(**arguments)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_taken(data_dir, tmp_path):
    (tmp_path / "mine").write_text("text")
    with pytest.raises(ValueError, match=r"exists and is not empty \(it has mine\)"):
        convert_checkpoint(data_dir / "tiny_llama", tmp_path, "orbax")
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine"]


def test_a_source_that_is_damaged_leaves_nothing(hf_copy, tmp_path, monkeypatch):
    from jaxinfer.checkpoint import load

    def stop(host, placement):
        raise ValueError("the disk is gone")

    monkeypatch.setattr(load, "_fill", stop)
    for format in FORMATS:
        with pytest.raises(ValueError, match="the disk is gone"):
            convert_checkpoint(
                hf_copy("tiny_llama") if format == "safetensors" else tmp_path / "tiny_llama", tmp_path / "out", format
            )
        assert [entry.name for entry in tmp_path.iterdir()] == ["tiny_llama"]


def test_a_full_disk_is_told_before_anything_is_read(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(ValueError, match=r"out takes [\d,]+ bytes, and 1,000 are free there"):
        convert_checkpoint(data_dir / "tiny_llama", tmp_path / "deep" / "out", "safetensors")
    assert list(tmp_path.iterdir()) == []


# Converts to both formats in a process that may write no file beyond 60,000 bytes.
FULL = """
import resource, signal, sys
from jaxinfer.checkpoint.convert import FORMATS, convert_checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
for format in FORMATS:
    try:
        convert_checkpoint(sys.argv[1], sys.argv[2], format)
    except (OSError, ValueError) as error:
        print(format, type(error).__name__, error)
"""


def test_a_disk_that_fills_up_leaves_nothing_and_is_named(data_dir, tmp_path):
    command = [sys.executable, "-c", FULL, str(data_dir / "tiny_llama"), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    safetensors, orbax = done.stdout.splitlines()
    assert safetensors == f"safetensors OSError [Errno 27] File too large: '{tmp_path / 'out'}'"
    assert orbax.startswith("orbax ValueError ") and "File too large" in orbax and str(tmp_path) in orbax
    assert list(tmp_path.iterdir()) == []


def test_values_beyond_float16_are_told(hf_copy, tmp_path):
    source = hf_copy("tiny_llama", lambda tensors: tensors["model.norm.weight"].__imul__(1e6))
    with pytest.warns(UserWarning, match="'final_norm/scale' has values beyond float16's 65504"):
        convert_checkpoint(source, tmp_path / "out", "safetensors", dtype="float16")


# Converts, or saves loaded parameters, and kills itself: at the n-th parameter, at the n-th file synced to disk (all
# are written then), or at the rename.
KILLED = """
import os, signal, sys
from pathlib import Path
from jaxinfer.checkpoint import convert, load, output_directory
source, output, format, where, count = *sys.argv[1:5], int(sys.argv[5])
left = count
def counted(function):
    def call(*words, **named):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*words, **named)
    return call
if format == "save":
    from jaxinfer.checkpoint import load_checkpoint, save_checkpoint
    params, config = load_checkpoint(source)
if where == "leaf":
    from jaxinfer.checkpoint import orbax_io
    load._fill = counted(load._fill)
    orbax_io._save = counted(orbax_io._save)
elif where == "sync":
    output_directory.sync_entry = counted(output_directory.sync_entry)
else:
    os.rename = counted(os.rename)
if format == "save":
    save_checkpoint(output, params, config)
else:
    convert.convert_checkpoint(source, output, format)
"""


def loads(folder: Path) -> bool:
    try:
        load_params(open_checkpoint(folder), "float32")
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("format", "where", "count"),
    [
        ("safetensors", "leaf", 3),
        ("safetensors", "rename", 0),
        ("orbax", "leaf", 3),
        ("orbax", "sync", 0),
        ("save", "leaf", 0),
        ("save", "rename", 0),
    ],
)
def test_killed_it_leaves_nothing_that_loads_and_can_be_repeated(format, where, count, data_dir, tmp_path):
    words = [str(data_dir / "tiny_llama"), str(tmp_path / "out"), format, where, str(count)]
    ended = subprocess.run([sys.executable, "-c", KILLED, *words], cwd=Path(__file__).parents[2], capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()[-2000:]
    assert not (tmp_path / "out").exists()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.partial-")
    if not any(left.iterdir()):  # nobody can tell whether such a folder is only just being made
        os.utime(left, (0, 0))
    again = convert_checkpoint(data_dir / "tiny_llama", tmp_path / "out", "orbax" if format == "save" else format)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert loads(again.path)


# Saves 60 MB of parameters; the parent kills it at some moment in between.
SAVING = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jaxinfer.checkpoint import save_checkpoint
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes
config, rng = ModelConfig(10000, 256, 1024, 10, 8), np.random.default_rng(0)
params = jax.tree.map(lambda leaf: jnp.asarray(rng.random(leaf.shape, np.float32)), param_shapes(config))
print("saving", flush=True)
save_checkpoint(sys.argv[1], params, config)
"""


@pytest.mark.slow
def test_killed_at_any_moment_there_is_nothing_or_everything(tmp_path):
    whole = []
    for delay in (0.05, 0.2, 0.5, 1.0, None):
        command = [sys.executable, "-c", SAVING, str(tmp_path / "out")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
            assert process.stdout is not None and process.stdout.readline() == "saving\n"
            try:
                process.wait(delay)
            except subprocess.TimeoutExpired:
                process.kill()
        whole.append((tmp_path / "out").exists())
        for folder in tmp_path.iterdir():
            assert loads(folder) == (folder.name == "out"), folder
            shutil.rmtree(folder)
    assert not whole[0] and whole[-1]
