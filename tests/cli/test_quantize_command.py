"""`jaxinfer quantize`."""

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


def test_writes_a_model_and_says_what(model, tmp_path, capsys):
    output = tmp_path / "out"
    words = ["quantize", "--model", str(model), "--output", str(output), "--method", "int4", "--asymmetric"]
    assert main([*words, "--group-size", "64", "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    title, _, header, *rows, _, last = said.out.splitlines()
    assert title == "Squared error of weights, in % of the square of the original:"
    assert header.split() == ["layer", "attn/out", "attn/qkv", "mlp/down", "mlp/gate_up"]
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert all(0.3 < float(cell) < 1.5 for row in rows for cell in row.split()[1:])
    num_params = sum(placement.tensor.size for placement in open_checkpoint(model).placements)
    layout = "compressed-tensors, int4 in groups of 64, asymmetric, the rest in bfloat16"
    assert last.startswith(f"{output}: {layout}; {num_params:,} parameters, {4 * num_params:,} bytes before, ")
    assert open_checkpoint(output).dtype == "bfloat16" and (output / "tokenizer.json").is_file()


def test_progress_is_shown_on_a_terminal(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["quantize", "--model", str(model), "--output", str(tmp_path / "o"), "--method", "int8"]) == 0
    assert "Quantizing to int8: 100%" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "int3"], "argument --method: invalid choice: 'int3'"),
        (["--method", "int8", "--calibration", "builtin"], "jaxinfer: error: calibration='builtin' is of 'awq' and"),
        (["--method", "int4", "--bits", "3"], "jaxinfer: error: bits=3 is not supported with method='int4'"),
        (["--method", "int4", "--group-size", "100"], "jaxinfer: error: group_size=100 must be one of 32, 64"),
        (["--method", "gptq", "--symmetric", "--asymmetric"], "not allowed with argument --symmetric"),
        (["--method", "gptq", "--damp", "2"], "jaxinfer: error: damp_percent=2.0 must be between 0 and 1"),
        (["--method", "int8", "--max-num-seqs", "3"], "unrecognized arguments: --max-num-seqs 3"),
    ],
    ids=str,
)
def test_bad_options_before_the_model_is_looked_for(words, message, tmp_path, capsys):
    assert main(["quantize", "--model", "no-such-model", "--output", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_taken_is_refused_before_the_model_is_looked_for(tmp_path, capsys):
    (tmp_path / "mine").write_text("text")
    assert main(["quantize", "--model", "no-such-model", "--output", str(tmp_path), "--method", "int8"]) == 2
    assert "exists and is not empty (it has mine); remove it or give another name" in capsys.readouterr().err


def test_help_says_what_it_writes(capsys):
    assert main(["quantize", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--group-size" in text and "AutoAWQ" in text and "goes on at the layer" in text


# Gets SIGTERM at the twelfth parameter that is written.
TERMINATED = """
import os, signal, sys
from jaxinfer.checkpoint.quantised_files import QuantisedFiles
from jaxinfer.cli.main import main
write, left = QuantisedFiles.write, 12
def counted(*words):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGTERM)
    return write(*words)
QuantisedFiles.write = counted
sys.exit(main(sys.argv[1:]))
"""


def test_sigterm_leaves_what_can_be_gone_on_with(tmp_path, capsys):
    words = ["--model", str(DATA / "tiny_llama"), "--output", str(tmp_path / "out"), "--method", "int8"]
    program = [sys.executable, "-c", TERMINATED, "quantize", *words]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 143, done.stderr
    partial = tmp_path / ".out.partial-resumable"
    assert done.stderr == f"jaxinfer: stopped; the same command goes on with {partial}\n"
    assert list(tmp_path.iterdir()) == [partial]
    assert main(["quantize", *words]) == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
