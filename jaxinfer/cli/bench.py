"""`jaxinfer bench`: measure how fast this machine serves a model."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jaxinfer.cli import bench_speculative
from jaxinfer.cli.engine_loading import load
from jaxinfer.cli.engine_options import add_engine_options, engine_args
from jaxinfer.cli.human_int import human_int

THROUGHPUT = """\
Serves prompts of random tokens that all arrive at once and prints how long that takes. Every request generates exactly
its output length (temperature 1, end-of-sequence ids ignored).

--static serves the same work in static batches of max_num_seqs: each waits for its longest member before the next one
enters, and a request counts as answered when its batch is. The ratio to a run without it is what continuous batching
gains; give --output-len-range to see it.
"""


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("bench", help="measure speed", description="Measures speed.", allow_abbrev=False)
    kinds = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    throughput = kinds.add_parser(
        "throughput",
        help="tokens per second on many requests at once",
        description=THROUGHPUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    throughput.set_defaults(run=run_throughput)
    _add_workload_options(throughput)
    throughput.add_argument("--static", action="store_true", help="serve static batches")
    throughput.add_argument("--greedy", action="store_true", help="temperature 0 instead of 1")
    throughput.add_argument("--disable-detokenize", action="store_true", help="do not turn the output into text")
    throughput.add_argument("--json", action="store_true", help="print one JSON object, in seconds and shares of 1")
    throughput.add_argument("--output-json", type=Path, metavar="FILE", help="write that JSON object to a file, too")
    add_engine_options(throughput, without=("seed",))
    bench_speculative.add_parser(kinds)


def _add_workload_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-prompts", type=human_int, default=100, metavar="N", help="requests. Default: 100.")
    for side, length in (("input", 128), ("output", 128)):
        exclusive = parser.add_mutually_exclusive_group()
        exclusive.add_argument(
            f"--{side}-len", type=human_int, default=length, metavar="N", help=f"{side} tokens. Default: {length}."
        )
        exclusive.add_argument(
            f"--{side}-len-range",
            type=human_int,
            nargs=2,
            metavar=("LOW", "HIGH"),
            help=f"{side} tokens of each request drawn uniformly from LOW to HIGH",
        )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the workload and of sampling. Default: 0.")


def run_throughput(arguments: argparse.Namespace) -> int:
    """Returns 0."""
    args = engine_args(arguments, seed=arguments.seed)

    from jaxinfer.bench.throughput import measure_throughput
    from jaxinfer.bench.workload import LengthRange, random_workload
    from jaxinfer.config import require_positive
    from jaxinfer.serving.progress import RequestProgress

    require_positive("num_prompts", arguments.num_prompts)
    input_len = LengthRange(*(arguments.input_len_range or [arguments.input_len] * 2))
    output_len = LengthRange(*(arguments.output_len_range or [arguments.output_len] * 2))
    if arguments.output_json is not None:
        arguments.output_json.touch()  # a path that cannot be written is better known before the run
    parts = load(args)
    config = parts.engine.config
    workload = random_workload(
        arguments.num_prompts,
        input_len,
        output_len,
        vocab_size=config.model.vocab_size,
        max_model_len=config.scheduler.max_model_len,
        seed=arguments.seed,
    )
    progress = RequestProgress(len(workload.prompts), sys.stderr.isatty())
    try:
        report = measure_throughput(
            parts.engine,
            workload,
            static=arguments.static,
            greedy=arguments.greedy,
            detokenize=not arguments.disable_detokenize and parts.tokenizer is not None,
            on_finished=progress.finished,
        )
    finally:
        progress.close()
    parts.close()
    _print(report, arguments)
    return 0


def _print(report: Any, arguments: argparse.Namespace) -> None:
    values = json.dumps(report.as_dict(), indent=None if arguments.json else 2)
    if arguments.output_json is not None:
        arguments.output_json.write_text(values + "\n", encoding="utf-8")
    print(values if arguments.json else report.as_text())
