#!/usr/bin/env python3
"""Checks and times the kernels and the decode step on the GPU of this machine, in one command of under 8 minutes.

    PYTHONPATH=. python scripts/gpu_check.py                      # everything; results in $OUT or build/gpu_check
    PYTHONPATH=. python scripts/gpu_check.py --only correctness   # a stage; --match TEXT chooses cases
    PYTHONPATH=. python scripts/gpu_check.py --rehearse           # tiny and interpreted, on any machine, no times
    PYTHONPATH=. python scripts/gpu_check.py --compile-for h200   # compiles every program for a GPU that is not here

Needs jax and flax; with PyTorch beside them it is compared too. Every result goes to results.jsonl at once, and
summary.md is written again after every stage, so that a run that is cut off leaves what it found. The work is done by
a worker process: where a kernel takes it down or hangs, the case is marked and a new worker goes on behind it. Exit
status 1: a check failed or a worker died; 2: there was nothing to do.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.gpu_checks.journal import Journal
from scripts.gpu_checks.options import Options, as_arguments, parse_options
from scripts.gpu_checks.report import as_markdown, write_summary

REPOSITORY = Path(__file__).resolve().parents[1]
WORKER = "scripts.gpu_checks.worker"
MAX_DEATHS = 5
EXIT_POISONED = 75
GRACE_SECONDS = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; returns the exit status."""
    options = parse_options(argv, (__doc__ or "").split("\n")[0])
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.jsonl"
    if path.exists():
        path.rename(path.with_suffix(f".{int(path.stat().st_mtime)}.jsonl"))
    deadline = time.monotonic() + options.budget
    status = supervise(options, deadline)
    if status == 2:  # the worker said why nothing was done
        return status
    journal = Journal(path)
    if status == 0 and options.match and not journal.records:
        print(f"--match {options.match}: no case of {', '.join(options.stages)} has this in its name")
        return 2
    write_summary(journal, options.out)
    print(as_markdown(journal))
    bad = [r for r in journal.records if r["status"] in ("failed", "crashed")]
    print(f"{len(bad)} failures; {options.budget - (deadline - time.monotonic()):.0f} s; results in {options.out}")
    return status or (1 if bad else 0)


def supervise(options: Options, deadline: float) -> int:
    """Runs workers, one after the other, until one ends well, time is up or too many died."""
    threads = options.threads
    for _ in range(MAX_DEATHS + 1):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        status = run_worker(options, left, threads)
        if status in (0, 2):
            return status
        blame(Journal(options.out / "results.jsonl"), status)
        threads = 1  # so that whatever is being compiled at the next death belongs to the case that is running
    return 1


def run_worker(options: Options, budget: float, threads: int) -> int:
    """Runs one worker and passes on what it prints. Killed when silent for too long or far beyond its budget."""
    command = [sys.executable, "-m", WORKER, *as_arguments(options, budget, threads)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    worker = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(worker, lines), daemon=True)
    reader.start()
    end = time.monotonic() + budget + GRACE_SECONDS
    try:
        while True:
            patience = min(options.stall, end - time.monotonic())
            line = lines.get(timeout=max(patience, 0.01))
            if line is None:
                return worker.wait()
            print(line, end="", flush=True)
    except queue.Empty:
        print(f"worker killed: {'silent for too long' if time.monotonic() < end else 'its time is up'}", flush=True)
        return -9
    finally:
        if worker.poll() is None:
            worker.kill()
            worker.wait()
        reader.join(timeout=GRACE_SECONDS)  # what the worker started may still hold its end
        assert worker.stdout
        worker.stdout.close()


def _read(worker: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert worker.stdout
    for line in worker.stdout:
        lines.put(line)
    lines.put(None)


def blame(journal: Journal, status: int) -> None:
    """Marks the case that was running when a worker died."""
    for record in journal.unfinished():
        facts = {name: value for name, value in record.items() if name not in ("stage", "case", "status", "t")}
        journal.add(record["stage"], record["case"], "crashed", **facts, why=f"the worker died with status {status}")
    if status != EXIT_POISONED:
        print(f"the worker died with status {status}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
