"""Quantising that is stopped, killed, or runs out of disk."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.checkpoint.quantised_files import QuantisedFiles
from jaxinfer.checkpoint.quantize import quantize_checkpoint
from jaxinfer.checkpoint.resumable_directory import Work


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_stopped_and_gone_on_with_it_is_the_same(small_model, tmp_path, monkeypatch):
    options = {"group_size": 32, "max_shard_bytes": 100_000}
    whole = quantize_checkpoint(small_model, tmp_path / "whole", "int4", **options)
    save, steps = Work.save, []

    def stop(work, progress):
        save(work, progress)
        steps.append(progress["steps"])
        raise KeyboardInterrupt

    monkeypatch.setattr(Work, "save", stop)
    for _ in range(3):  # what is in no layer, and two layers
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(small_model, tmp_path / "out", "int4", **options)
        (left,) = (entry for entry in tmp_path.iterdir() if entry.name.startswith(".out"))
        with pytest.raises(ValueError, match="not a model directory"):
            open_checkpoint(left)
    monkeypatch.setattr(Work, "save", save)
    again = quantize_checkpoint(small_model, tmp_path / "out", "int4", **options)
    assert steps == [1, 2, 3]
    assert contents(again.path) == contents(whole.path) and len(contents(whole.path)) > 6
    assert replace(again, path=whole.path) == whole
    assert not list(tmp_path.glob(".out*"))


def test_a_run_of_another_kind_or_of_a_changed_model_is_refused(small_model, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(QuantisedFiles, "sync", lambda files: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(QuantisedFiles, "write", lambda files, leaf, values: None)
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(small_model, tmp_path / "out", "int4", group_size=32)
    assert quantize_checkpoint(small_model, tmp_path / "out", "int8").method == "int8"  # nothing had been done yet
    shutil.rmtree(tmp_path / "out")
    save = Work.save
    with monkeypatch.context() as patch:
        patch.setattr(Work, "save", lambda *args: (save(*args), (_ for _ in ()).throw(KeyboardInterrupt)))
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(small_model, tmp_path / "out", "int4", group_size=32)
    with pytest.raises(ValueError, match=r"another kind \(group_size 32 then, 64 now\)"):
        quantize_checkpoint(small_model, tmp_path / "out", "int4", group_size=64)
    os.utime(small_model / "model.safetensors", (0, 0))
    with pytest.raises(ValueError, match=r'another kind \(model files "\w+" then'):
        quantize_checkpoint(small_model, tmp_path / "out", "int4", group_size=32)


# Kills itself at the fifth parameter that is written.
KILLED = """
import os, signal, sys
from jaxinfer.checkpoint import quantised_files
from jaxinfer.checkpoint.quantize import quantize_checkpoint
write, left = quantised_files.QuantisedFiles.write, 5
def counted(*words):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*words)
quantised_files.QuantisedFiles.write = counted
quantize_checkpoint(sys.argv[1], sys.argv[2], "int4", group_size=32)
"""


def test_killed_it_goes_on(small_model, tmp_path):
    words = [sys.executable, "-c", KILLED, str(small_model), str(tmp_path / "out")]
    ended = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()[-2000:]
    assert not (tmp_path / "out").exists()
    quantize_checkpoint(small_model, tmp_path / "out", "int4", group_size=32)
    quantize_checkpoint(small_model, tmp_path / "whole", "int4", group_size=32)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert {entry.name for entry in tmp_path.iterdir()} == {small_model.name, "out", "whole"}


def test_a_disk_that_is_full_or_fills_up_leaves_nothing(small_model, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
        with pytest.raises(ValueError, match=r"out takes [\d,]+ bytes, and 1,000 are free there"):
            quantize_checkpoint(small_model, tmp_path / "out", "int8")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path / 'out'}'"):
            quantize_checkpoint(small_model, tmp_path / "out", "int8")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [entry.name for entry in tmp_path.iterdir()] == [small_model.name]
