"""Folders that are filled in several runs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer.checkpoint.output_directory import output_directory
from jaxinfer.checkpoint.resumable_directory import resumable_directory

RUN = {"method": "gptq", "group_size": 64}
# Does two of three steps, says so, and is killed by itself or waits.
WORKING = """
import os, signal, sys, time
from jaxinfer.checkpoint.resumable_directory import resumable_directory
with resumable_directory(sys.argv[1], {"method": "gptq", "group_size": 64}) as work:
    for step in (1, 2):
        (work.folder / str(step)).write_text(f"step {step}")
        work.save({"done": step})
    print("ready", flush=True)
    if sys.argv[2] == "wait":
        time.sleep(100)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def start(output: Path, then: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", WORKING, str(output), then]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_a_killed_run_is_gone_on_with(tmp_path):
    with start(tmp_path / "out", "die") as process:
        assert process.wait() == -signal.SIGKILL
    assert [entry.name for entry in tmp_path.iterdir()] == [".out.partial-resumable"]
    with resumable_directory(tmp_path / "out", RUN) as work:
        assert work.progress == {"done": 2}
        assert (work.folder / "2").read_text() == "step 2"
        (work.folder / "3").write_text("step 3")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == ["1", "2", "3"]


def test_another_kind_of_run_is_refused_and_what_is_there_stays(tmp_path):
    with pytest.raises(KeyboardInterrupt), resumable_directory(tmp_path / "out", RUN) as work:
        work.save({"done": 1})
        raise KeyboardInterrupt
    message = r"partial-resumable holds an unfinished run of another kind \(group_size 64 then, 128 now\)"
    with pytest.raises(ValueError, match=message), resumable_directory(tmp_path / "out", {**RUN, "group_size": 128}):
        pass
    with resumable_directory(tmp_path / "out", RUN) as work:
        assert work.progress == {"done": 1}


def test_what_was_left_before_anything_was_remembered_is_cleared_away(tmp_path):
    folder = tmp_path / ".out.partial-resumable"
    (folder / "sub").mkdir(parents=True)
    (folder / "half").write_text("text")
    with resumable_directory(tmp_path / "out", RUN) as work:
        assert work.progress == {} and list(work.folder.iterdir()) == []


@pytest.mark.parametrize("error", [ValueError("values"), OSError("disk")], ids=str)
def test_what_would_fail_again_leaves_nothing(error, tmp_path):
    with pytest.raises(type(error), match=str(error)), resumable_directory(tmp_path / "out", RUN) as work:
        work.save({"done": 1})
        raise error
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_published_stays_until_it_can(tmp_path):
    with pytest.raises(ValueError, match="made by somebody else"), resumable_directory(tmp_path / "out", RUN) as work:
        (work.folder / "1").write_text("hours of work")
        work.save({"done": 1})
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("text")
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    with resumable_directory(tmp_path / "out", RUN) as work:
        assert work.progress == {"done": 1}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["elsewhere", "out"]
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["1"]


def test_two_at_once_are_refused(tmp_path):
    with start(tmp_path / "out", "wait") as process:
        message = "is being written by another process"
        with pytest.raises(ValueError, match=message), resumable_directory(tmp_path / "out", RUN):
            pass
        with output_directory(tmp_path / "out"):  # sweeps what nobody is at
            assert (tmp_path / ".out.partial-resumable" / "2").exists()
        process.kill()


def test_another_writer_of_the_same_output_removes_what_was_left(tmp_path):
    with start(tmp_path / "out", "die") as process:
        process.wait()
    os.utime(tmp_path / ".out.partial-resumable", (0, 0))
    with output_directory(tmp_path / "out"):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_an_output_that_is_taken_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("text")
    with pytest.raises(ValueError, match="exists and is not empty"), resumable_directory(tmp_path / "out", RUN):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
