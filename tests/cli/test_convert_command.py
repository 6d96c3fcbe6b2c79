"""`jaxinfer convert`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.cli.main import main

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def model(write_checkpoint, tiny_config, tiny_params):
    return write_checkpoint(tiny_config, tiny_params(), eos_token_id=7)


@pytest.mark.parametrize(("format", "file"), [("safetensors", "config.json"), ("orbax", "jaxinfer.json")])
def test_writes_a_model_and_says_what(format, file, model, tmp_path, capsys):
    output = tmp_path / "out"
    words = ["convert", "--model", str(model), "--output", str(output), "--format", format, "--dtype", "bfloat16"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.err == ""
    num_params = sum(placement.tensor.size for placement in open_checkpoint(model).placements)
    assert said.out == f"{output}: {format}, {num_params:,} parameters in bfloat16, {2 * num_params:,} bytes\n"
    assert (output / file).is_file() and (output / "tokenizer.json").is_file()
    assert open_checkpoint(output).dtype == "bfloat16"


def test_shards(model, tmp_path, capsys):
    words = ["convert", "--model", str(model), "--output", str(tmp_path / "out"), "--format", "safetensors"]
    assert main([*words, "--max-shard-size", "100K"]) == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1


def test_a_model_without_a_tokenizer_is_a_warning(tmp_path, capsys):
    words = ["convert", "--model", str(DATA / "tiny_qwen2"), "--output", str(tmp_path / "out"), "--format", "orbax"]
    assert main(words) == 0
    assert capsys.readouterr().err.startswith("jaxinfer: warning: no tokenizer is written: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "pickle"], "argument --format: invalid choice: 'pickle'"),
        (["--format", "orbax", "--dtype", "int8"], "jaxinfer: error: dtype='int8' must be"),
        (["--format", "orbax", "--max-shard-size", "x"], "argument --max-shard-size"),
        (["--format", "orbax", "--max-num-seqs", "3"], "unrecognized arguments: --max-num-seqs 3"),
        ([], "the following arguments are required: --format"),
    ],
    ids=str,
)
def test_bad_options(words, message, tmp_path, capsys):
    given = ["convert", "--model", str(DATA / "tiny_llama"), "--output", str(tmp_path / "out"), *words]
    assert main(given) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_taken_is_refused_before_the_model_is_looked_for(tmp_path, capsys):
    (tmp_path / "mine").write_text("text")
    assert main(["convert", "--model", "no-such-model", "--output", str(tmp_path), "--format", "orbax"]) == 2
    assert "exists and is not empty (it has mine); remove it or give another name" in capsys.readouterr().err


def test_a_model_that_does_not_exist(tmp_path, capsys):
    words = ["convert", "--model", "./nowhere", "--output", str(tmp_path / "out"), "--format", "orbax"]
    assert main(words) == 2
    assert "model='./nowhere' does not exist" in capsys.readouterr().err


def test_progress_is_shown_on_a_terminal(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["convert", "--model", str(model), "--output", str(tmp_path / "o"), "--format", "safetensors"]) == 0
    assert "Converting: 100%" in capsys.readouterr().err


def test_help_says_what_it_writes(capsys):
    assert main(["convert", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--max-shard-size" in text and "killed" in text


def test_as_a_program(model, tmp_path):
    words = ["convert", "--model", str(model), "--output", str(tmp_path / "out"), "--format", "orbax"]
    done = subprocess.run([sys.executable, "-m", "jaxinfer", *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path / 'out'}: orbax, ")


# Gets SIGTERM at the third parameter that is read.
TERMINATED = """
import os, signal, sys
from jaxinfer.checkpoint import load
from jaxinfer.cli.main import main
fill, left = load._fill, 3
def counted(*words):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGTERM)
    return fill(*words)
load._fill = counted
sys.exit(main(sys.argv[1:]))
"""


def test_sigterm_leaves_nothing(tmp_path):
    words = ["convert", "--model", str(DATA / "tiny_llama"), "--output", str(tmp_path / "out"), "--format", "orbax"]
    done = subprocess.run([sys.executable, "-c", TERMINATED, *words], capture_output=True, text=True)
    assert done.returncode == 143, done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
