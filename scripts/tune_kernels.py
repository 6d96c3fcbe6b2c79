#!/usr/bin/env python3
"""Measures the kernels' tile sizes and split policy on the GPU of this machine, for the tables that they read.

    PYTHONPATH=. python scripts/tune_kernels.py                          # head dim 128, everything
    PYTHONPATH=. python scripts/tune_kernels.py --kernel decode --head-dim 64 --head-dim 128 --budget 300

The tables are `measured.py` in the folders of paged_attention, flash_attention and quantized_matmul; --out DIR, by
default $OUT where that is set, gets copies of them instead. A candidate counts when its numbers are right, and replaces
the choice of `config.py` when it is at least 2 % faster. A table is written after each search, so that a run that is
cut off leaves what it found. Without an NVIDIA GPU there is nothing to measure, and the script says so (exit status 2);
`--rehearse` goes through the motions with tiny shapes and interpreted kernels, and needs --out.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))
KERNELS = ("decode", "split", "prefill", "flash", "quantized")
GAIN = 0.98
"""A candidate's time over that of the choice without it must be below this."""


def main(argv: Sequence[str] | None = None) -> int:
    """Searches what the command line asks for; returns the exit status."""
    args = parse_args(argv)
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # its old name; JAX takes one of them
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.75")
    if args.rehearse:
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from scripts.tuning.searches import searches

    if not args.rehearse and jax.default_backend() != "gpu":
        print(f"no GPU: JAX has {jax.devices()}. Tiles are measured on the GPU they are for", file=sys.stderr)
        return 2
    session = make_session(args)
    kind = jax.local_devices()[0].device_kind
    try:
        for search in searches(session, kind, args.kernel, args.head_dim):
            if session.seconds_left() <= 0:
                print(f"{search.name}: no time left")
                continue
            best = run_search(session, search)
            if best is not None:
                print(f"{search.name}: {search.table}[{search.key!r}] = {best!r}", flush=True)
                write_entry(args.out, search, best)
    finally:
        session.programs.close()
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses and checks; a bad value ends the program with argparse's status 2."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kernel", action="append", choices=KERNELS, help="may be repeated; all is the default")
    parser.add_argument("--head-dim", action="append", type=int, help="may be repeated; 128 is the default")
    parser.add_argument("--budget", type=float, default=460.0, help="seconds; searches that do not fit are left out")
    parser.add_argument("--threads", type=int, default=min(12, os.cpu_count() or 1), help="programs compiled at a time")
    parser.add_argument("--out", type=Path, help="folder for copies of the tables (default: $OUT, else in place)")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, interpreted kernels, no GPU")
    args = parser.parse_args(argv)
    args.kernel = args.kernel or list(KERNELS)
    args.head_dim = args.head_dim or [128]
    if args.out is None and os.environ.get("OUT"):
        args.out = Path(os.environ["OUT"])
    if args.rehearse and args.out is None:
        parser.error("--rehearse needs --out DIR: its times mean nothing, so that they must not get into the tables")
    for head_dim in args.head_dim:
        if not 16 <= head_dim <= 256:
            parser.error(f"--head-dim is {head_dim}: the kernels take 16 to 256")
    return args


def make_session(args: argparse.Namespace) -> Any:
    """A session of gpu_check's, for its cases."""
    from scripts.gpu_checks.journal import Journal
    from scripts.gpu_checks.options import Options
    from scripts.gpu_checks.programs import Programs
    from scripts.gpu_checks.session import Session
    from scripts.gpu_checks.torch_peer import TorchPeer

    out = (args.out or REPOSITORY / "build" / "tune_kernels").resolve()
    out.mkdir(parents=True, exist_ok=True)
    options = Options((), args.budget, out, args.rehearse, None, "", args.threads, 60.0)
    return Session(
        options, Journal(out / "tuning.jsonl"), Programs(args.threads, rehearse=args.rehearse), TorchPeer("cpu")
    )


def run_search(session: Any, search: Any) -> tuple[Any, ...] | None:
    """The best candidate, or None where none is better than what is chosen without the entry."""
    traced = [(candidate, trace(search, candidate)) for candidate in (None, *search.candidates)]
    for _, cases in traced:
        for _, programs in cases:
            session.programs.submit(programs)
    times: dict[Any, float] = {}
    session.programs.wait_until_idle(session.seconds_left())
    for candidate, cases in traced:
        begin = time.monotonic()
        seconds, why = measure(session, cases)
        session.journal.add(search.name, repr(candidate), "failed" if why else "ok", us=seconds, why=why)
        rate = why or f"{seconds:.1f} us" if session.options.claims_times else why or "right"
        print(f"  {search.name} {candidate or 'as it is'}: {rate}, {time.monotonic() - begin:.1f} s", flush=True)
        if not why:
            times[candidate] = seconds
        if session.seconds_left() <= 0:
            break
    now = times.pop(None, math.inf)
    best = min(times, key=lambda candidate: times[candidate], default=None)
    good = best is not None and (times[best] < GAIN * now or session.options.rehearse)
    return best if good else None


def trace(search: Any, candidate: tuple[Any, ...] | None) -> list[tuple[Any, list[Any]]]:
    """The search's cases and their programs, traced while the table has the candidate as its entry.

    The programs' names get the candidate, since that is what tells them apart.
    """
    from scripts.gpu_checks.case import Program

    table = {key: value for key, value in getattr(search.module, search.table).items() if key != search.key}
    entry = {} if candidate is None else {search.key: candidate}
    result: list[tuple[Any, list[Any]]] = []
    with mock.patch.object(search.module, search.table, table | entry):
        for case in search.cases():
            first, *others = case.programs
            try:
                lowered = first.function.lower(*first.args)
            except (ValueError, NotImplementedError) as error:
                result.append((f"{type(error).__name__}: {error}", []))
                continue
            program = Program(f"{search.name} {candidate} {first.name}", Lowered(lowered), ())
            result.append((case, [program, *others]))
    return result


class Lowered:
    """A traced program in the place of a jitted function: what is left to do is to compile it."""

    def __init__(self, lowered: Any) -> None:
        self._lowered = lowered

    def lower(self) -> Any:
        """What it was made of."""
        return self._lowered


def measure(session: Any, cases: list[tuple[Any, list[Any]]]) -> tuple[float, str]:
    """Geometric mean of the cases' microseconds, and what is wrong where something is."""
    logs = []
    for case, programs in cases:
        if isinstance(case, str):
            return 0.0, case
        try:
            built = [session.programs.get(program, session.seconds_left()) for program in programs]
            values = case.run(session, [b.call for b in built])
        except Exception as error:  # too much shared memory, wrong numbers: the next candidate may do
            lines = str(error).splitlines()
            return 0.0, f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
        logs.append(math.log(values.get("us", 1.0)))
    return math.exp(sum(logs) / len(logs)), ""


def write_entry(out: Path | None, search: Any, value: tuple[Any, ...]) -> None:
    """Into the kernel's table, or into the copy in `out`; the entry also holds for the searches that follow."""
    from scripts.tuning.table import merge_into

    source = Path(search.module.__file__)
    path = source
    if out is not None:
        path = out / f"{source.parent.name}_measured.py"
        if not path.exists():
            path.write_text(source.read_text())
    merge_into(path, search.table, {search.key: value})
    setattr(search.module, search.table, dict(getattr(search.module, search.table)) | {search.key: value})


if __name__ == "__main__":
    sys.exit(main())
