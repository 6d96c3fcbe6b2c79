"""What a run is asked to do; the command line of `gpu_check.py` and of its worker processes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxinfer.planning.gpu_specs import GPU_SPECS

STAGES = ("card", "correctness", "bandwidth", "paged_decode", "prefill", "peers", "products", "decode_step")
"""In the order in which they run."""


@dataclass(frozen=True)
class Options:
    """The parsed command line.

    Attributes:
        stages: the stages to run, in order.
        budget: seconds for the whole run.
        out: folder of `results.jsonl` and `summary.md`.
        rehearse: tiny shapes and interpreted kernels, on any machine; times are not reported.
        compile_for: a GPU's short name: every program is compiled for it, none is run.
        match: only cases whose name contains this.
        threads: programs compiled at a time.
        stall: seconds without a sign of life after which a worker is taken for hung.
    """

    stages: tuple[str, ...]
    budget: float
    out: Path
    rehearse: bool
    compile_for: str | None
    match: str
    threads: int
    stall: float

    @property
    def claims_times(self) -> bool:
        """Whether what the clock says means anything."""
        return not self.rehearse and self.compile_for is None


def parse_options(argv: Sequence[str] | None, description: str) -> Options:
    """Parses and checks; a bad value ends the program with argparse's status 2."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", action="append", choices=STAGES, help="run this stage alone; may be repeated")
    parser.add_argument("--skip", action="append", choices=STAGES, default=[], help="leave this stage out; likewise")
    parser.add_argument("--match", default="", metavar="TEXT", help="only the cases with this in their name")
    parser.add_argument("--budget", type=float, default=460.0, help="seconds for everything; the least important goes")
    parser.add_argument(
        "--out", type=Path, help="folder for results.jsonl and summary.md (default: $OUT, else a build)"
    )
    parser.add_argument("--threads", type=int, default=min(12, os.cpu_count() or 1), help="programs compiled at a time")
    parser.add_argument("--stall", type=float, default=60.0, help="seconds of silence before a worker is killed")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--rehearse", action="store_true", help="tiny shapes, interpreted kernels, no GPU, no times")
    mode.add_argument(
        "--compile-for",
        choices=GPU_SPECS,
        metavar="GPU",
        help=f"compile for this GPU, run nothing: {', '.join(GPU_SPECS)}",
    )
    args = parser.parse_args(argv)
    for field, least in (("budget", 1), ("threads", 1), ("stall", 1)):
        if getattr(args, field) < least:
            parser.error(f"--{field} is {getattr(args, field)}: give at least {least}")
    stages = tuple(name for name in STAGES if name in (args.only or STAGES) and name not in args.skip)
    if not stages:
        parser.error("--only and --skip leave no stage")
    out = (args.out or Path(os.environ.get("OUT") or "build/gpu_check")).resolve()
    return Options(stages, args.budget, out, args.rehearse, args.compile_for, args.match, args.threads, args.stall)


def as_arguments(options: Options, budget: float, threads: int) -> list[str]:
    """The command line of a worker that does what is left of `options`."""
    arguments = ["--budget", str(budget), "--out", str(options.out), "--threads", str(threads)]
    for stage in options.stages:
        arguments += ["--only", stage]
    if options.match:
        arguments += ["--match", options.match]
    if options.rehearse:
        arguments += ["--rehearse"]
    if options.compile_for:
        arguments += ["--compile-for", options.compile_for]
    return arguments
