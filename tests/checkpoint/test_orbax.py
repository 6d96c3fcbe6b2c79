"""Saving and loading parameters with Orbax: interchange with Orbax itself, shardings, memory, and what does not fit."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.core import freeze, unfreeze

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoint import load_checkpoint, load_orbax, open_checkpoint, save_checkpoint
from jaxinfer.checkpoint.orbax_directory import DESCRIPTION
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import init_params

CONFIG = ModelConfig(64, 32, 48, 2, 4, 2, rope_freq_factors=(1.0, 1.0, 2.0, 8.0), qkv_bias=True, rope_theta=5e5)


def same(left, right) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.fixture
def params(random_params):
    return jax.tree.map(jnp.asarray, random_params(CONFIG))


@pytest.fixture
def saved(params, tmp_path):
    save_checkpoint(tmp_path / "saved", params, CONFIG, eos_token_ids=[7], generation_config={"temperature": 0.5})
    return tmp_path / "saved"


def test_there_and_back(saved, params):
    loaded, config = load_checkpoint(saved)
    assert config == CONFIG
    same(loaded, params)
    same(load_orbax(saved, CONFIG), params)
    assert all(isinstance(leaf, jax.Array) and leaf.dtype == np.float32 for leaf in jax.tree.leaves(loaded))


def test_relative_paths(saved, params, monkeypatch):
    (saved.parent / "beside").mkdir()
    monkeypatch.chdir(saved.parent)
    same(load_checkpoint("saved")[0], params)
    monkeypatch.chdir("beside")
    same(load_orbax("../saved", CONFIG), params)
    save_checkpoint("again", params, CONFIG)
    same(load_checkpoint("again")[0], params)


def test_what_is_known_without_loading(saved):
    checkpoint = open_checkpoint(saved)
    assert checkpoint.model_config == CONFIG
    assert checkpoint.dtype == "float32"
    assert checkpoint.eos_token_ids == {7}
    assert checkpoint.generation_config == {"temperature": 0.5}
    assert checkpoint.leaves["layers_1/attn/qkv/kernel"].shape == (2, 4, 8, 32)


def test_orbax_itself_reads_it(saved, params):
    with ocp.StandardCheckpointer() as checkpointer:
        same(checkpointer.restore(saved / "params"), params)


def test_what_orbax_itself_wrote_is_read(params, tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "theirs", params)
    same(load_orbax(tmp_path / "theirs", CONFIG), params)


@pytest.mark.parametrize("kind", ["numpy", "frozen", "bfloat16"])
def test_other_leaves(kind, params, tmp_path):
    given = {
        "numpy": lambda: jax.tree.map(np.asarray, params),
        "frozen": lambda: freeze(params),
        "bfloat16": lambda: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params),
    }[kind]()
    save_checkpoint(tmp_path / "saved", given, CONFIG)
    loaded, _ = load_checkpoint(tmp_path / "saved")
    same(loaded, unfreeze(given))
    assert loaded["embed"]["embedding"].dtype == given["embed"]["embedding"].dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_cast_while_loading(dtype, saved, params):
    loaded, _ = load_checkpoint(saved, dtype=dtype)
    same(loaded, jax.tree.map(lambda leaf: leaf.astype(dtype), params))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(load_orbax(saved, CONFIG, dtype=dtype))} == {dtype}


def test_served_with_its_tokenizer(write_checkpoint, random_params, tiny_config, tmp_path):
    from dataclasses import replace

    config = replace(tiny_config, vocab_size=258)
    params = random_params(config)
    original = write_checkpoint(config, params)
    (original / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    save_checkpoint(tmp_path / "saved", params, config, tokenizer=original, eos_token_ids=[257])
    outputs = []
    for path in (original, tmp_path / "saved"):
        with LLM(path, max_num_seqs=2, num_gpu_blocks_override=16, enforce_eager=True, use_tqdm_on_load=False) as llm:
            greedy = SamplingParams(temperature=0, max_tokens=12)
            answers = [
                llm.generate("hello", greedy, use_tqdm=False),
                llm.chat([{"role": "user", "content": "x"}], greedy),
            ]
            outputs.append([(out.prompt_token_ids, out.outputs[0].token_ids) for (out,) in answers])
    assert outputs[0] == outputs[1]
    assert outputs[0][0][0] == list(b"hello") and outputs[0][1][0] == list(b"x!")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda p: p["layers_1"]["mlp"].pop("down"), r"params has no 'layers_1/mlp/down/kernel' \[32, 48\]"),
        (lambda p: p.update(wings={"kernel": jnp.ones(3)}), "params has 'wings/kernel', which this model does not"),
        (
            lambda p: p["embed"].update(embedding=jnp.ones((63, 32))),
            r"params at 'embed/embedding' is \[63, 32\]; this model needs \[64, 32\]",
        ),
        (lambda p: p["embed"].update(embedding=jnp.ones((64, 32), jnp.int32)), "has dtype int32; it must be one of"),
        (lambda p: p["embed"].update(embedding=1.5), "params at 'embed/embedding' is float, not an array"),
        (lambda p: p["embed"]["embedding"].delete(), "params at 'embed/embedding' has been deleted"),
    ],
    ids=["missing", "extra", "shape", "dtype", "scalar", "deleted"],
)
def test_saving_what_does_not_fit(edit, message, params, tmp_path):
    edit(params)
    with pytest.raises(ValueError, match=message):
        save_checkpoint(tmp_path / "saved", params, CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_saving_a_whole_variables_dict(params, tmp_path):
    with pytest.raises(ValueError, match=r"pass variables\['params'\]"):
        save_checkpoint(tmp_path / "saved", {"params": params}, CONFIG)


def test_saving_over_something(saved, params):
    with pytest.raises(ValueError, match="saved exists and is not empty"):
        save_checkpoint(saved, params, CONFIG)


def test_a_missing_tokenizer_leaves_nothing(params, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="neither tokenizer.json nor tokenizer.model"):
        save_checkpoint(tmp_path / "saved", params, CONFIG, tokenizer=tmp_path / "empty")
    assert [entry.name for entry in tmp_path.iterdir()] == ["empty"]


def rewrite(saved: Path, **changes) -> None:
    content = json.loads((saved / DESCRIPTION).read_text())
    (saved / DESCRIPTION).write_text(json.dumps(content | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "this jaxinfer reads 'orbax', 1: update it"),
        ({"format": "zip"}, "format='zip'"),
        ({"dtype": "int4"}, "dtype='int4' must be one of"),
        ({"leaves": None}, "is malformed"),
        ({"model_config": {"vocab_size": 64}}, "is malformed.*hidden_size"),
        ({"eos_token_ids": ["x"]}, "is malformed"),
    ],
    ids=str,
)
def test_a_description_that_is_wrong(changes, message, saved):
    rewrite(saved, **changes)
    with pytest.raises(ValueError, match=rf"jaxinfer\.json .*{message}"):
        open_checkpoint(saved)


def test_a_description_without_parameters(saved):
    (saved / "params" / "_METADATA").unlink()
    with pytest.raises(ValueError, match="params is missing or no Orbax checkpoint"):
        open_checkpoint(saved)


def test_a_description_of_another_model_names_tensor_and_both_shapes(saved):
    fields = json.loads((saved / DESCRIPTION).read_text())["model_config"]
    rewrite(saved, model_config=fields | {"intermediate_size": 50})
    with pytest.raises(ValueError, match=r"mlp/down/kernel is \[32, 48\] but layers_0/mlp/down/kernel is \[32, 50\]"):
        load_checkpoint(saved)
    rewrite(saved, model_config=fields | {"num_hidden_layers": 3})
    with pytest.raises(ValueError, match=r"layers_2/attn/out/kernel \(for layers_2/\S+ \[32, 2, 2, 8\]\).* missing"):
        load_checkpoint(saved)
    rewrite(saved, model_config=fields | {"num_hidden_layers": 1})
    with pytest.raises(ValueError, match=r"layers_1/attn/out/kernel float32\[32, 2, 2, 8\].* has no place"):
        load_checkpoint(saved)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax drops what else failed
@pytest.mark.parametrize("keep", [0, 100, 20000])
def test_damaged_data_is_an_error_that_names_the_folder(keep, saved):
    files = [file for file in (saved / "params").rglob("*") if file.is_file() and file.parent.name == "d"]
    assert max(file.stat().st_size for file in files) > keep
    for file in files:
        file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"saved/params (is not an Orbax|cannot be read)"):
        load_checkpoint(saved)


def test_an_orbax_checkpoint_that_does_not_say_what_it_is(saved):
    with pytest.raises(ValueError, match=r"params is an Orbax checkpoint without jaxinfer\.json.*load_orbax"):
        open_checkpoint(saved / "params")


# Saves parameters that are split over 8 devices, loads them split otherwise over 4, and compares.
SHARDED = """
import sys
from pathlib import Path
import jax, numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from jaxinfer.checkpoint import load_checkpoint, load_orbax, save_checkpoint
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import init_params
config = ModelConfig(64, 32, 48, 2, 16, 8, 8)
params = init_params(config, jax.random.key(0))
mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
split = lambda leaf: NamedSharding(mesh, PartitionSpec("x") if leaf.shape[0] % 8 == 0 else PartitionSpec())
sharded = jax.tree.map(lambda leaf: jax.device_put(leaf, split(leaf)), params)
save_checkpoint(sys.argv[1], sharded, config)
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(Path(sys.argv[3]), {"params": sharded})
eight = jax.tree.map(split, params)
from_one, _ = load_checkpoint(sys.argv[2], sharding=eight)
jax.tree.map(np.testing.assert_array_equal, from_one, params)
assert len(from_one["embed"]["embedding"].addressable_shards) == 8
small = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
def other(leaf):
    return NamedSharding(small, PartitionSpec(*[None] * (leaf.ndim - 1), "x" if leaf.shape[-1] % 4 == 0 else None))
targets = jax.tree.map(other, params)
for loaded in (load_checkpoint(sys.argv[1], sharding=targets)[0], load_orbax(sys.argv[1], config, sharding=targets)):
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert loaded["embed"]["embedding"].sharding == targets["embed"]["embedding"]
    assert len(loaded["embed"]["embedding"].addressable_shards) == 4
    assert loaded["embed"]["embedding"].addressable_shards[0].data.shape == (64, 8)
one = load_orbax(sys.argv[1], config, sharding=jax.devices()[3])
assert one["embed"]["embedding"].devices() == {jax.devices()[3]}
try:
    load_orbax(sys.argv[1], config, sharding={"embed": targets["embed"]})
except ValueError as error:
    assert "differs from them at 'final_norm/scale'" in str(error), error
else:
    raise AssertionError("a tree of other paths was taken")
print("same")
"""


def run(code: str, *words: str, **environment: str) -> str:
    import os

    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[2], env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_sharded_parameters_are_saved_and_loaded_into_other_shardings(tmp_path):
    """On one device, on four and on eight, saved by processes that had another number of them."""
    config = ModelConfig(64, 32, 48, 2, 16, 8, 8)
    params = init_params(config, jax.random.key(0))
    save_checkpoint(tmp_path / "one", params, config)
    flags = "--xla_force_host_platform_device_count=8"
    folders = [str(tmp_path / name) for name in ("saved", "one", "training")]
    assert run(SHARDED, *folders, XLA_FLAGS=flags) == "same\n"
    assert jax.device_count() == 1
    same(load_checkpoint(tmp_path / "saved")[0], params)
    same(load_orbax(tmp_path / "training", config), params)


# 604 MB of float32 parameters, the embedding (131 MB) being the largest.
MEMORY = """
import sys, gc, jax, numpy as np
from pathlib import Path
from jaxinfer.checkpoint import load_checkpoint, load_orbax
from jaxinfer.checkpoint.leaf_shapes import leaf_shapes
from jaxinfer.checkpoint import orbax_io
from jaxinfer.models.config import ModelConfig
def status(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) * 1024
config = ModelConfig(32000, 1024, 4096, 7, 16, tie_word_embeddings=True)
if sys.argv[1] == "write":
    specs = leaf_shapes(config, np.float32)
    orbax_io.write_stream(Path(sys.argv[2]), specs, ((n, np.full(s.shape, 0.5, np.float32)) for n, s in specs.items()))
else:
    jax.block_until_ready(jax.numpy.zeros(8))
    load_orbax
before = status("VmRSS")
if sys.argv[1] == "read":
    params = load_orbax(sys.argv[2], config)
    print(status("VmHWM") - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
else:
    print(status("VmHWM"), 0)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from Linux's /proc")
def test_peak_memory(tmp_path):
    """Writing holds some arrays of a stream; reading the parameters, and some arrays of the checkpoint."""
    writing, _ = map(int, run(MEMORY, "write", str(tmp_path / "saved")).split())
    assert writing < 604e6 + 131e6  # the whole process, with JAX and Orbax, against 604 MB of values
    growth, loaded = map(int, run(MEMORY, "read", str(tmp_path / "saved")).split())
    assert loaded > 590e6
    assert growth < loaded + 131e6 + 300e6
