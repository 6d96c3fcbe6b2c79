"""`jaxinfer batch`: a file of requests to a file of responses."""

import argparse
import contextlib
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.engine_loading import load
from jaxinfer.cli.engine_options import add_engine_options, engine_args
from jaxinfer.cli.generate import read_template
from jaxinfer.cli.human_int import human_int

if TYPE_CHECKING:
    from jaxinfer.cluster.ray_batch import RayOptions
    from jaxinfer.openai.batch_output import BatchOutput
    from jaxinfer.startup.args import EngineArgs

DESCRIPTION = """\
Serves a file of OpenAI batch requests, {"custom_id", "method": "POST", "url", "body"} a line, with url
/v1/chat/completions or /v1/completions, and writes a response a line: {"id", "custom_id", "response": {"status_code",
"request_id", "body"}, "error"}. Responses come in the order in which they finish.

A line that cannot be served gets status_code 400 and an error that says why; the others go on, and the exit status is
0 all the same. Stopped or killed in between, the same command goes on where it was: lines that have a response are
not done again.

With --ray the requests are spread over the machines of a Ray cluster, an engine to a worker (the extra: `pip install
'jaxinfer[ray]'`). What a worker had not finished that dies is done by another.
"""


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "batch",
        help="serve a file of OpenAI requests",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE", help="requests, JSON lines")
    parser.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help="responses, JSON lines")
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        help='what the field "model" of a request has to be, where it is given. Default: the --model.',
    )
    parser.add_argument("--chat-template", metavar="FILE", help="Jinja template in place of the model's")
    group = parser.add_argument_group("Ray options")
    group.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="serve with engines on a Ray cluster: the one at ADDRESS (auto, host:port, or local for a new one of this "
        "machine alone); without ADDRESS the one that RAY_ADDRESS names or that runs on this machine, else a new one. "
        "The model has to be found, or fetched, on every machine.",
    )
    group.add_argument(
        "--ray-workers",
        type=human_int,
        metavar="N",
        help="engines. Default: as many as the cluster has GPUs for; one a machine where it has none.",
    )
    group.add_argument(
        "--ray-gpus-per-worker",
        type=human_int,
        metavar="N",
        help="GPUs of each engine. Default: as many as it runs on, where the cluster has any.",
    )
    add_engine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns 0."""
    args = engine_args(arguments)
    name = arguments.served_model_name or str(args.model)
    template = read_template(arguments.chat_template)
    source, target = arguments.input_file, arguments.output_file
    if source.exists() and not source.is_file():
        raise ValueError(f"--input-file {source} is not a file; what comes from a pipe cannot be read twice")
    ray_options = _ray_options(arguments)

    from jaxinfer.openai.batch_input import batch_keys
    from jaxinfer.openai.batch_output import BatchOutput

    keys = batch_keys(source)
    if target.exists() and target.samefile(source):
        raise ValueError(f"--output-file {target} is the input file; give another")
    with BatchOutput(target) as output:
        # Numbers are lines that could not be read; they may have been mended since.
        foreign = sorted(key for key in output.done - keys if isinstance(key, str))
        if foreign:
            raise ValueError(f"{target} has a response for {foreign[0]!r}, which {source} does not; give another file")
        missing = keys - output.done
        if len(missing) < len(keys):
            print(f"{len(keys) - len(missing)} of {len(keys)} requests are done already", file=sys.stderr)
        if missing:
            task = _Task(args, source, output, missing, name, template)
            results = _Results(len(keys), len(keys) - len(missing))
            if ray_options is None:
                _serve(task, results)
            else:
                _serve_on_ray(task, results, ray_options)
    return 0


@dataclass(frozen=True)
class _Task:
    """The `missing` requests of a file, by key, and what they are served with."""

    args: "EngineArgs"
    source: Path
    output: "BatchOutput"
    missing: Collection[str | int]
    model_name: str
    template: str | None


class _Results:
    """Counts results while it is entered, with a progress bar on a terminal, and says at the end what came of the run.

    Args:
        total: requests of the file.
        num_done: how many of them were done before.
    """

    def __init__(self, total: int, num_done: int) -> None:
        self._total, self._num_done, self._num_errors = total, num_done, 0

    def count(self, is_error: bool) -> None:
        """Takes a result that is on the disk."""
        self._num_done += 1
        self._num_errors += is_error
        self._bar.update()

    def __enter__(self) -> "_Results":
        from jaxinfer.progress_bar import ProgressBar

        options: dict[str, Any] = {"dynamic_ncols": True, "disable": None}
        self._bar = ProgressBar(total=self._total, initial=self._num_done, desc="Requests", **options)
        return self

    def __exit__(self, *error: object) -> None:
        summary = f"{self._num_done} of {self._total} requests done, {self._num_errors} errors in this run"
        self._bar.write(summary, file=sys.stderr)
        self._bar.close()


def _ray_options(arguments: argparse.Namespace) -> "RayOptions | None":
    """What is said about Ray; None for an engine in this process."""
    if arguments.ray is None:
        for name in ("ray_workers", "ray_gpus_per_worker"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')}={getattr(arguments, name)} needs --ray")
        return None
    from jaxinfer.cluster.ray_batch import RayOptions

    return RayOptions(arguments.ray, arguments.ray_workers, arguments.ray_gpus_per_worker)


def _serve(task: _Task, results: _Results) -> None:
    """Loads an engine and does the requests."""
    from jaxinfer.openai.batch_input import read_batch
    from jaxinfer.openai.batch_job import BatchJob
    from jaxinfer.openai.request import RequestReader

    parts = load(task.args)
    reader = RequestReader(parts.tokenizer, parts.defaults, task.model_name, task.template)
    job = BatchJob(parts.engine, reader, task.output, task.model_name, results.count)
    with results:
        job.run(line for line in read_batch(task.source) if line.key in task.missing)
    parts.close()


def _serve_on_ray(task: _Task, results: _Results, options: "RayOptions") -> None:
    """Has engines on a Ray cluster do the requests."""
    from jaxinfer.cluster.ray_batch import serve_on_ray
    from jaxinfer.openai.batch_input import parse_line, raw_lines

    chosen = ((number, raw) for number, raw in raw_lines(task.source) if parse_line(number, raw).key in task.missing)
    answers = serve_on_ray(chosen, len(task.missing), task.args, options, task.model_name, task.template)
    with results, contextlib.closing(answers):
        for some in answers:
            task.output.write(some)
            for result in some:
                results.count(result["error"] is not None)
