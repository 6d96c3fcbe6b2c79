"""`jaxinfer distill`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.checkpoint.leaf_shapes import flat
from jaxinfer.checkpoint.resumable_directory import partial_of


@pytest.fixture
def words(write_checkpoint: Callable[..., Path], tiny_config: Any, random_params: Any, tmp_path: Path) -> list[str]:
    """A tiny teacher, a text, and few steps."""
    config = replace(tiny_config, vocab_size=258, hidden_size=32, num_attention_heads=2, num_key_value_heads=1)
    teacher = write_checkpoint(config, random_params(config), name="teacher")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the log. " * 12)
    sizes = ["--steps", "6", "--batch-size", "2", "--seq-len", "32", "--save-every", "1", "--log-every", "1"]
    return ["distill", "--teacher", str(teacher), "--data", str(text), "--student-layers", "1", *sizes]


@pytest.mark.filterwarnings("ignore:loss.png was not drawn")
def test_trains_and_says_how_well(words: list[str], tmp_path: Path, jaxinfer: Any) -> None:
    output = tmp_path / "out"
    assert jaxinfer(*words, "--output", str(output), "--learning-rate", "0.01", "--objective", "reverse_kl") == 0
    first, second = jaxinfer.stdout.splitlines()
    size = sum(leaf.size for leaf in flat(load_checkpoint(output)[0]).values())
    assert first == f"{output}: {size:,} parameters after 6 steps"
    assert second.startswith("held-out loss in nats a token: teacher ")
    said = json.loads((output / "distillation.json").read_text())["options"]
    assert (said["objective"], said["optimizer"]["learning_rate"], said["batch_size"]) == ("reverse_kl", 0.01, 2)


@pytest.mark.slow
def test_killed_with_kill_and_resumed_is_not_interrupted(words: list[str], tmp_path: Path, jaxinfer: Any) -> None:
    """SIGKILL after the third checkpoint, in a process of its own."""
    output = tmp_path / "killed"
    command = [sys.executable, "-m", "jaxinfer", *words, "--output", str(output)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=dict(os.environ))
    third = partial_of(output) / "checkpoints" / "step_3"
    for _ in range(3000):
        if third.is_dir() or process.poll() is not None:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not output.exists()
    for name, more in (("killed", ["--resume"]), ("whole", [])):
        command = [sys.executable, "-m", "jaxinfer", *words, "--output", str(tmp_path / name), *more]
        subprocess.run(command, capture_output=True, check=True)
    killed, whole = (flat(load_checkpoint(tmp_path / name)[0]) for name in ("killed", "whole"))
    for name, leaf in whole.items():
        assert np.array_equal(leaf, killed[name]), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--objective", "mse"], "objective='mse' must be one of forward_kl, reverse_kl, cross_entropy"),
        (["--temperature", "0"], "temperature=0.0 must be a number above 0"),
        (["--top-k", "258"], "top_k=258 must be below the vocabulary's 258 tokens"),
        (["--top-k", "4", "--hidden-weight", "1"], "hidden_weight needs the teacher in memory; leave top_k out"),
        (["--on-policy", "2"], "on_policy needs data='generate'"),
        (["--on-policy", "2", "--top-k", "4"], "on_policy has the teacher judge new texts; leave top_k"),
        (["--student-layers", "3"], "student_layers=3 must be 1 to the teacher's 2"),
        (["--student-layers", "1,0"], "student_layers=[1, 0] must be ascending numbers of layers, 0 to 1"),
        (
            ["--cache-features", "--hidden-weight", "1"],
            "hidden_weight needs the teacher in memory",
        ),
        (["--cache-features", "--top-k", "4"], "cache_features keeps what the teacher makes of given texts"),
        (["--loss-vocab", "259"], "loss_vocab=259 must be 0, for all, or 1 to the model's 258 tokens"),
        (["--loss-vocab", "9", "--top-k", "4"], "loss_vocab cuts the distributions on given texts; leave top_k"),
        (["--answers-only"], "answers_only is for data='generate'"),
        (["--unroll", "2"], "--unroll and --from-model need --eagle"),
        (["--student", "/no/student"], "give either student, a checkpoint or a config, or student_layers"),
        (["--seq-len", "1024"], "seq_len=1024 exceeds the 512 positions"),
        (["--accumulate", "4"], "batch_size=2 must be a multiple of 4"),
        (["--devices", "99"], "devices=99 must be 1 to the"),
        (["--learning-rate", "-1"], "learning_rate=-1.0 must be a number above 0"),
        (["--warmup-steps", "7"], "warmup_steps=7 must be 0 to steps=6"),
        (["--steps", "0"], "steps=0 must be at least 1"),
        (["--log-every", "0"], "log_every=0 must be at least 1"),
        (["--eval-fraction", "1"], "eval_fraction=1.0 must be 0 to below 1"),
        (["--num-texts", "4"], "--top-p are for --data generate"),
        (["--save-dtype", "int8"], "dtype='int8' must be 'auto', 'float32', 'bfloat16' or 'float16'"),
        (["--medusa-heads", "2"], "--student and --student-layers make a model; leave them out"),
        (["--medusa-heads", "2", "--eagle"], "give one of --medusa-heads, --eagle and --eagle3"),
        (["--medusa-layers", "2"], "need --medusa-heads, the number of heads"),
        (["--data", "/no/text.txt"], "/no/text.txt"),
        (["--teacher", "/no/teacher"], "/no/teacher"),
    ],
)
def test_refuses_before_anything_is_loaded(
    options: list[str], message: str, words: list[str], tmp_path: Path, jaxinfer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxinfer.training.teacher.load_params", lambda *_, **__: pytest.fail("weights are read"))
    assert jaxinfer(*words, "--output", str(tmp_path / "out"), *options) == 2
    assert message in jaxinfer.stderr
    assert not (tmp_path / "out").exists() and not partial_of(tmp_path / "out").exists()


def test_another_vocabulary_is_refused(
    words: list[str], write_checkpoint: Callable[..., Path], tiny_config: Any, tiny_params: Any, tmp_path: Path,
    jaxinfer: Any,
) -> None:  # fmt: skip
    student = write_checkpoint(tiny_config, tiny_params(0), name="student")
    del words[words.index("--student-layers") : words.index("--student-layers") + 2]
    assert jaxinfer(*words, "--student", str(student), "--output", str(tmp_path / "out")) == 2
    assert "the student has a vocabulary of 256 tokens and the teacher one of 258" in jaxinfer.stderr


def test_options_of_students_are_refused_for_heads(words: list[str], tmp_path: Path, jaxinfer: Any) -> None:
    del words[words.index("--student-layers") : words.index("--student-layers") + 2]
    for option in (["--top-k", "4"], ["--on-policy", "2"], ["--objective", "reverse_kl"]):
        assert jaxinfer(*words, "--eagle", "--output", str(tmp_path / "out"), *option) == 2
        assert "--top-k and --on-policy are for students" in jaxinfer.stderr
