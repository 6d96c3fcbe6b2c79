"""The log of a run and what is made of it."""

from pathlib import Path

import pytest

from jaxinfer.training.curve import TrainingLog, plot_curves, write_table


def test_a_resumed_log_drops_what_will_be_done_again(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = TrainingLog(path, -1)
    for step in (0, 2, 4):
        log.add(step, {"loss": step / 3})
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # the process was killed
    again = TrainingLog(path, 2)
    assert again.entries == [{"step": 0, "loss": 0.0}, {"step": 2, "loss": 2 / 3}]
    again.add(3, {"loss": 1.0, "eval_nll": 2.0})
    assert path.read_text().splitlines()[-1] == '{"step": 3, "loss": 1.0, "eval_nll": 2.0}'
    write_table(again.entries, tmp_path / "log.csv")
    assert (tmp_path / "log.csv").read_text().split() == ["step,loss,eval_nll", "0,0.0,", f"2,{2 / 3},", "3,1.0,2.0"]


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match="needs matplotlib.*pip install 'jaxinfer"):
        plot_curves([{"step": 1, "loss": 2.0}], "title", tmp_path / "loss.png")


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    entries = [{"step": 0, "eval_nll": 3.0}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "eval_nll": 2.0}]
    plot_curves(entries, "title", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
