"""`jaxinfer convert`: a checkpoint in another format."""

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from jaxinfer.cli.human_int import human_int
from jaxinfer.cli.model_options import add_model_options, find_model

DESCRIPTION = """\
Writes a model as a directory of safetensors in Hugging Face's layout, or of Orbax, with its tokenizer, chat template
and generation config. `--model OUTPUT` serves what was written.

Parameters are read and written one at a time. OUTPUT appears when it is whole: a conversion that is stopped leaves
nothing, a killed one nothing that loads, and the next one to the same OUTPUT removes what is left of it.
"""


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "convert",
        help="write a model as safetensors or Orbax",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--model", required=True, metavar="MODEL", help="folder, GGUF file, Hub id or built-in name")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="new or empty folder")
    parser.add_argument(
        "--format", required=True, choices=("safetensors", "orbax"), help="safetensors is Hugging Face's layout"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        metavar="DTYPE",
        help="float32, bfloat16 or float16; 'auto' is the checkpoint's own, bfloat16 for a quantised file (only "
        "float32 keeps its values exactly). Default: auto.",
    )
    parser.add_argument(
        "--max-shard-size",
        type=human_int,
        default="5G",
        metavar="BYTES",
        help="largest safetensors file, e.g. 500M or 2G. Default: 5G.",
    )
    add_model_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns 0."""
    from jaxinfer.checkpoint.convert import convert_checkpoint
    from jaxinfer.checkpoint.output_directory import check_output

    check_output(arguments.output)  # before anything is downloaded
    with tidy_end():
        done = convert_checkpoint(
            find_model(arguments.model, arguments),
            arguments.output,
            arguments.format,
            dtype=arguments.dtype,
            max_shard_bytes=arguments.max_shard_size,
            progress=sys.stderr.isatty(),
        )
    print(f"{done.path}: {done.format}, {done.num_params:,} parameters in {done.dtype}, {done.nbytes:,} bytes")
    return 0


@contextlib.contextmanager
def tidy_end() -> Iterator[None]:
    """SIGTERM ends the process by an exception, like Ctrl-C, so that what is half written is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(signum: int, frame: FrameType | None) -> None:
    signal.signal(signum, signal.SIG_DFL)  # who sends a second one does not want to wait
    raise SystemExit(128 + signum)
