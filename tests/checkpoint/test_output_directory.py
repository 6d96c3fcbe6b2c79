"""Output folders: whole or absent, whatever ends the process that makes them."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxinfer.checkpoint.output_directory import UNFINISHED_SECONDS, output_directory

# Writes a file into an unfinished folder, says so, and waits to be killed.
WAITING = """
import sys, time
from jaxinfer.checkpoint.output_directory import output_directory
with output_directory(sys.argv[1]) as folder:
    (folder / "half").write_text("x" * 1000)
    print("ready", flush=True)
    time.sleep(100)
"""


def start_waiting(output: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, str(output)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def age(folder: Path) -> None:
    """Makes a folder as old as one that nobody is just making."""
    old = time.time() - UNFINISHED_SECONDS - 1
    os.utime(folder, (old, old))


def test_appears_at_the_end_with_all_its_content(tmp_path):
    with output_directory(tmp_path / "new" / "out") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("text")
        assert not (tmp_path / "new" / "out").exists()
    assert (tmp_path / "new" / "out" / "sub" / "file").read_text() == "text"
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["out"]


def test_an_error_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), output_directory(tmp_path / "out") as folder:
        (folder / "file").write_text("text")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_threads_that_go_on_writing_after_an_error_leave_nothing(tmp_path):
    def go_on():
        for step in range(25):
            with contextlib.suppress(OSError):  # removed in the middle of it
                (partial / f"part{step % 3}").mkdir(parents=True, exist_ok=True)
            time.sleep(0.01)

    writer = threading.Thread(target=go_on)
    with pytest.raises(ValueError, match="halfway"), output_directory(tmp_path / "out") as partial:
        writer.start()
        raise ValueError("halfway")
    writer.join()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    with output_directory(tmp_path / "out") as folder:
        (folder / "file").write_text("text")
    assert (tmp_path / "out" / "file").exists()


def test_what_is_there_is_kept(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("text")
    with (
        pytest.raises(ValueError, match=r"out exists and is not empty \(it has mine\)"),
        output_directory(tmp_path / "out"),
    ):
        pass
    with pytest.raises(ValueError, match="mine exists and is a file"), output_directory(tmp_path / "out" / "mine"):
        pass
    assert (tmp_path / "out" / "mine").read_text() == "text"


def test_somebody_was_faster(tmp_path):
    with (
        pytest.raises(ValueError, match="was made by somebody else meanwhile"),
        output_directory(tmp_path / "out") as folder,
    ):
        (folder / "file").write_text("mine")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "file").write_text("theirs")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "theirs"


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    with start_waiting(tmp_path / "out") as process:
        process.send_signal(signal.SIGKILL)
    (leftover,) = tmp_path.iterdir()
    assert leftover.name.startswith(".out.partial-")
    with output_directory(tmp_path / "out"):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_may_be_just_in_the_making(tmp_path):
    for name, old in ((".out.partial-0", False), (".out.partial-1", True)):
        (tmp_path / name).mkdir()
        if old:
            age(tmp_path / name)
    with output_directory(tmp_path / "out"):
        pass
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".out.partial-0", "out"]


def test_a_running_process_keeps_its_folder(tmp_path):
    with start_waiting(tmp_path / "out") as process:
        (theirs,) = tmp_path.iterdir()
        age(theirs)
        with output_directory(tmp_path / "out"):
            pass
        kept = (theirs / "half").exists()
        process.kill()
    assert kept
