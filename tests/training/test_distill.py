"""Whole distillation runs on tiny models."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.checkpoint.leaf_shapes import flat
from jaxinfer.checkpoint.resumable_directory import partial_of
from jaxinfer.training import student_texts, training_run
from jaxinfer.training.corpus import DataOptions
from jaxinfer.training.distill import Distillation, DistillOptions, distill
from jaxinfer.training.teacher_texts import Writing

pytestmark = pytest.mark.filterwarnings("ignore:loss.png was not drawn")


def weights(folder: Path) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in flat(load_checkpoint(folder)[0]).items()}


def test_the_student_learns_and_is_an_ordinary_checkpoint(
    teacher: Path, data: DataOptions, training: Callable[..., Any], tmp_path: Path
) -> None:
    from jaxinfer import LLM, SamplingParams

    output = tmp_path / "student"
    report = distill(teacher, output, data, training(20, eval_every=10), student_layers=2)
    assert isinstance(report, Distillation) and report.path == output
    assert report.start_nll is not None and report.final_nll is not None and report.teacher_nll is not None
    log = [json.loads(line) for line in (output / "training_log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == list(range(21))
    assert log[-1]["loss"] < 0.5 * log[1]["loss"]
    with (output / "training_log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 21 and float(rows[20]["loss"]) == log[20]["loss"] and rows[5]["eval_nll"] == ""
    assert json.loads((output / "distillation.json").read_text())["final_nll"] == report.final_nll
    assert sorted(path.name for path in output.iterdir() if path.is_dir()) == []
    config = json.loads((output / "config.json").read_text())
    assert config["num_hidden_layers"] == 2 and config["architectures"] == ["LlamaForCausalLM"]
    llm = LLM(str(output), max_model_len=16, max_num_seqs=1, enforce_eager=True, num_gpu_blocks_override=4)
    found = llm.generate("the", SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    assert len(found[0].outputs[0].token_ids) == 2
    llm.shutdown()


def test_kept_hidden_states_stand_for_the_teacher(
    teacher: Path, training: Callable[..., Any], tmp_path: Path, data: DataOptions
) -> None:
    """Whole distributions, of hidden states in float16 on disk and of a vocabulary that lacks none of the data's."""
    made = {}
    for name, options in {
        "memory": DistillOptions(save_dtype="float32"),
        "disk": DistillOptions(save_dtype="float32", cache_features=True, loss_vocab=258),
        "cut": DistillOptions(save_dtype="float32", cache_features=True, loss_vocab=20),
    }.items():
        made[name] = distill(teacher, tmp_path / name, data, training(4), options, student_layers=[0, 2])
    (before, after), start = ([made[name].final_nll for name in ("memory", "disk")], made["memory"].start_nll)
    assert before is not None and after is not None and start is not None
    assert abs(before - after) < 1e-2 * abs(before - start)
    cut = made["cut"].final_nll
    assert cut is not None and cut != after
    entry = json.loads((tmp_path / "disk" / "training_log.jsonl").read_text().splitlines()[-1])
    assert 0 <= entry["eval_top1"] <= 1 <= entry["eval_length"] <= 6


class Killed(BaseException):
    """What a signal does to a process, as far as files are concerned."""


def test_a_killed_run_goes_on_to_the_same_bits(
    teacher: Path, data: DataOptions, training: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in its fifth step of seven, it goes on from the fourth; all files are those of a run without a break."""
    options = DistillOptions(top_k=8, temperature=2.0)
    pace = training(7, save_every=2, eval_every=3, log_every=3, warmup_steps=2, weight_decay=0.1)
    distill(teacher, tmp_path / "whole", data, pace, options, student_layers=1)
    make = training_run.save_state

    def kill(folder: Path, step: int, state: Any) -> None:
        if step == 6:
            raise Killed
        make(folder, step, state)

    monkeypatch.setattr(training_run, "save_state", kill)
    with pytest.raises(Killed):
        distill(teacher, tmp_path / "broken", data, pace, options, student_layers=1)
    monkeypatch.setattr(training_run, "save_state", make)
    assert not (tmp_path / "broken").exists()
    with pytest.raises(ValueError, match="an unfinished run of .*broken lies in .*give --resume"):
        distill(teacher, tmp_path / "broken", data, pace, options, student_layers=1)
    with pytest.raises(ValueError, match="temperature 2.0 then, 1.0 now"):
        other = replace(options, temperature=1.0)
        distill(teacher, tmp_path / "broken", data, pace, other, student_layers=1, resume=True)
    distill(teacher, tmp_path / "broken", data, pace, options, student_layers=1, resume=True)
    whole, broken = weights(tmp_path / "whole"), weights(tmp_path / "broken")
    for name, leaf in whole.items():
        assert np.array_equal(leaf, broken[name]), name
    for file in ("training_log.jsonl", "training_log.csv", "config.json"):
        assert (tmp_path / "whole" / file).read_text() == (tmp_path / "broken" / file).read_text()


def test_a_failed_run_keeps_what_is_done(
    teacher: Path, data: DataOptions, training: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = training_run.save_state

    def full(folder: Path, step: int, state: Any) -> None:
        if step == 4:
            raise OSError(28, "No space left on device")
        make(folder, step, state)

    monkeypatch.setattr(training_run, "save_state", full)
    with pytest.raises(RuntimeError, match="No space left on device; what is done stays in .*give --resume"):
        distill(teacher, tmp_path / "out", data, training(4, save_every=2), student_layers=1)
    assert (partial_of(tmp_path / "out") / "checkpoints" / "step_2").is_dir()


def test_the_teacher_writes_the_texts(
    teacher: Path, training: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept where they may be used again: by a second run that starts no engine and loads no teacher."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat"}\n{"prompt": "a dog"}\n')
    data = DataOptions(prompts=(prompts,), writing=Writing(6, 10, seed=5), seq_len=16, eval_fraction=0.0)
    options = DistillOptions("reverse_kl", top_k=4)
    kept = tmp_path / "kept"
    distill(teacher, tmp_path / "one", data, training(2), options, student_layers=1, teacher_cache=kept)
    texts = json.loads((kept / "texts" / "texts_00000000.json").read_text())
    assert [bytes(text[: -len(text) + (7 if i % 2 == 0 else 5)]) for i, text in enumerate(texts)] == [
        b"the cat",
        b"a dog",
    ] * 3
    assert len({tuple(text) for text in texts}) == 6 and all(len(text) <= 17 for text in texts)
    monkeypatch.setattr("jaxinfer.training.teacher.load_params", lambda *_, **__: pytest.fail("the teacher is loaded"))
    monkeypatch.setattr("jaxinfer.llm.LLM", lambda *_, **__: pytest.fail("an engine is started"))
    distill(teacher, tmp_path / "two", data, training(2), options, student=tmp_path / "one", teacher_cache=kept)
    assert weights(tmp_path / "two").keys() == weights(tmp_path / "one").keys()
    with pytest.raises(RuntimeError, match="was made with max_tokens=10; this run has max_tokens=9"):
        shorter = replace(data, writing=Writing(6, 9, seed=5))
        distill(teacher, tmp_path / "three", shorter, training(2), student_layers=1, teacher_cache=kept)


def test_hidden_states_of_another_width(
    teacher: Path, data: DataOptions, training: Callable[..., Any], tmp_path: Path
) -> None:
    """A student described in JSON, half as wide: a projection is learned and not written."""
    described = tmp_path / "student.json"
    sizes = {"vocab_size": 258, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    described.write_text(json.dumps({**sizes, "num_attention_heads": 2, "max_position_embeddings": 64}))
    options = DistillOptions(hidden_weight=0.5)
    distill(teacher, tmp_path / "out", data, training(12), options, student=described)
    log = [json.loads(line) for line in (tmp_path / "out" / "training_log.jsonl").read_text().splitlines()]
    assert log[-1]["hidden"] < log[1]["hidden"]
    np.testing.assert_allclose(log[-1]["loss"], log[-1]["divergence"] + 0.5 * log[-1]["hidden"], rtol=1e-5)
    assert {leaf.shape for leaf in weights(tmp_path / "out").values()} >= {(258, 16)}


def test_the_student_writes_what_it_learns_from(
    teacher: Path, text: Path, training: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds of two steps, of a student that has changed in between; resumed in the second, no text is new."""
    writing = Writing(4, 10, seed=5)
    data = DataOptions(writing=writing, seq_len=16, eval_files=(text,))
    options, pace = DistillOptions("reverse_kl", on_policy=2), training(4, save_every=3, batch_size=2)
    seen: dict[int, Any] = {}
    make = student_texts.write_texts

    def watched(folder: Path, *rest: Any) -> list[list[int]]:
        texts = make(folder, *rest)
        seen[len(seen)] = (folder.name, texts)
        return texts

    monkeypatch.setattr(student_texts, "write_texts", watched)
    distill(teacher, tmp_path / "whole", data, pace, options, student_layers=1)
    assert [name for name, _ in seen.values()] == ["round_000000", "round_000001"]
    assert seen[0][1] != seen[1][1] and all(text[0] == 256 and len(text) <= 11 for text in seen[0][1])
    save = training_run.save_state

    def kill(folder: Path, step: int, state: Any) -> None:
        if step == 4:
            raise Killed
        save(folder, step, state)

    monkeypatch.setattr(training_run, "save_state", kill)
    with pytest.raises(Killed):
        distill(teacher, tmp_path / "broken", data, pace, options, student_layers=1)
    monkeypatch.setattr(training_run, "save_state", save)
    monkeypatch.setattr("jaxinfer.llm.LLM", lambda *_, **__: pytest.fail("an engine is started"))
    distill(teacher, tmp_path / "broken", data, pace, options, student_layers=1, resume=True)
    whole, broken = weights(tmp_path / "whole"), weights(tmp_path / "broken")
    assert all(np.array_equal(leaf, broken[name]) for name, leaf in whole.items())
