#!/usr/bin/env python3
"""What a decode step, or every kernel, comes to on a GPU that is not here: memory, launches, CUDA graphs, registers.

    python scripts/gpu_audit.py --gpu h200 --model llama-3-8b --batch 32           # one step
    python scripts/gpu_audit.py --gpu a100-80g --model /path/to/config.json --tp 2 # on two GPUs
    python scripts/gpu_audit.py --all --output FILE.md                             # every kernel, case and GPU

Everything is compiled to the end and nothing is run or allocated. Needs JAX's CUDA plugin and CUDA's assembler, as
`scripts/test.sh --deviceless` installs them into .venv-deviceless. Exit status 1: a kernel of --all did not compile,
spills registers or takes more shared memory than the GPU has.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))
sys.path.append(str(REPOSITORY / ".venv-deviceless"))  # the plugin, where the test script has put it
os.environ["JAX_PLATFORMS"] = "cpu"  # the plugin only compiles; with a GPU it would take its memory
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for the processes of --all

from jaxinfer.planning.gpu_specs import GPU_SPECS  # noqa: E402
from scripts.gpu_audits.models import MODELS, model_named  # noqa: E402

OPERATIONS = (
    *("paged_attention", "flash_attention", "rope_kv_write", "kv_write", "block_copy"),
    *("norm_gated_matmul", "quantized_matmul"),
)
MATRIX_GPUS = ("a100-80g", "rtx4090", "h100", "h200")


def main(argv: Sequence[str] | None = None) -> int:
    """Does what the command line asks for; returns the exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.op and not args.all:
        fail(parser, f"--op {args.op[0]} chooses kernels of --all: give --all too")
    if args.output and (args.output.is_dir() or not args.output.parent.is_dir()):
        fail(parser, f"--output {args.output} must be a file in a folder that exists")
    try:
        text, status = audit_all(args) if args.all else audit_one(args)
    except (ValueError, RuntimeError) as error:
        fail(parser, str(error))
    print(text)
    if args.output:
        args.output.write_text(text + "\n")
    return status


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    summary, *_ = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--gpu", action="append", choices=GPU_SPECS, help="default: h200; with --all may be repeated")
    parser.add_argument(
        "--model", default="llama-3-8b", help=f"{', '.join(MODELS)}, or a config.json or the folder of one"
    )
    parser.add_argument("--batch", type=positive, default=32, help="rows of the decode step (32)")
    parser.add_argument("--context", type=positive, default=2048, help="positions of each row (2048)")
    parser.add_argument("--tp", type=positive, default=1, help="GPUs that the layers are split over (1)")
    parser.add_argument("--layers", type=positive, help="compile so many layers only")
    parser.add_argument("--all", action="store_true", help="audit every kernel and case instead of a step")
    parser.add_argument("--op", action="append", choices=OPERATIONS, help="with --all: only this; may be repeated")
    parser.add_argument("--jobs", type=positive, default=os.cpu_count() or 1, help="with --all: processes (one a core)")
    parser.add_argument("--output", type=Path, help="also write what is printed into this file")
    return parser


def audit_one(args: argparse.Namespace) -> tuple[str, int]:
    """The step that `args` describes: what to print, and the exit status."""
    from dataclasses import replace

    from scripts.gpu_audits.step_audit import audit_step

    gpus = args.gpu or ["h200"]
    if len(gpus) > 1:
        raise ValueError(f"--gpu was given {len(gpus)} times; a step is audited for one GPU, --all for several")
    config = model_named(args.model)
    if args.layers:
        config = replace(config, num_hidden_layers=args.layers)
    return audit_step(gpus[0], args.model, config, args.batch, args.context, args.tp), 0


def audit_all(args: argparse.Namespace) -> tuple[str, int]:
    """The matrix: what to print, and the exit status."""
    import jax

    from jaxinfer.planning.deviceless import gpu_target
    from scripts.gpu_audits.matrix import audit_kernels, kernel_table

    gpus, ops = args.gpu or MATRIX_GPUS, args.op or OPERATIONS
    gpu_target(gpus[0])  # a missing plugin is one error, not one a case
    outcomes = audit_kernels(gpus, ops, args.jobs)
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    kernels = sum(len(outcome.kernels) for outcome in outcomes)
    lines = [
        f"# Kernels compiled for {', '.join(gpus)}",
        "",
        f"{datetime.date.today()}, jax {jax.__version__}: {len(outcomes)} programs, {kernels} kernels, "
        f"{len(faults)} faults.",
        "Registers and spilled bytes are for each thread, shared memory is bytes a block, temp is the whole program's.",
        "",
        *(f"* {fault}" for fault in faults),
        *([""] if faults else []),
        "```",
        kernel_table(outcomes),
        "```",
    ]
    return "\n".join(lines), int(bool(faults))


def positive(text: str) -> int:
    """An int of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def fail(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Ends the program without a traceback, status 2."""
    parser.exit(2, f"{parser.prog}: error: {message}\n")


if __name__ == "__main__":
    sys.exit(main())
