"""`jaxinfer batch`: a file of requests to a file of responses."""

import argparse
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jaxinfer.cli.engine_loading import load
from jaxinfer.cli.engine_options import add_engine_options, engine_args
from jaxinfer.cli.generate import read_template

DESCRIPTION = """\
Serves a file of OpenAI batch requests, {"custom_id", "method": "POST", "url", "body"} a line, with url
/v1/chat/completions or /v1/completions, and writes a response a line: {"id", "custom_id", "response": {"status_code",
"request_id", "body"}, "error"}. Responses come in the order in which they finish.

A line that cannot be served gets status_code 400 and an error that says why; the others go on, and the exit status is
0 all the same. Stopped or killed in between, the same command goes on where it was: lines that have a response are
not done again.
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
    add_engine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns 0."""
    args = engine_args(arguments)
    name = arguments.served_model_name or str(args.model)
    template = read_template(arguments.chat_template)
    source, target = arguments.input_file, arguments.output_file
    if source.exists() and not source.is_file():
        raise ValueError(f"--input-file {source} is not a file; what comes from a pipe cannot be read twice")

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
            _serve(args, source, output, missing, len(keys), name, template)
    return 0


def _serve(
    args: Any, source: Path, output: Any, missing: Collection[str | int], total: int, name: str, template: str | None
) -> None:
    """Loads the engine and does the `missing` ones of `total` requests, with a progress bar on a terminal."""
    from jaxinfer.openai.batch_input import read_batch
    from jaxinfer.openai.batch_job import BatchJob
    from jaxinfer.openai.request import RequestReader
    from jaxinfer.progress_bar import ProgressBar

    parts = load(args)
    reader = RequestReader(parts.tokenizer, parts.defaults, name, template)
    num_done = total - len(missing)
    results = {False: 0, True: 0}
    with ProgressBar(total=total, initial=num_done, desc="Requests", dynamic_ncols=True, disable=None) as bar:

        def count(is_error: bool) -> None:
            results[is_error] += 1
            bar.update()

        job = BatchJob(parts.engine, reader, output, name, count)
        try:
            job.run(line for line in read_batch(source) if line.key in missing)
        finally:
            finished = num_done + sum(results.values())
            bar.write(f"{finished} of {total} requests done, {results[True]} errors in this run", file=sys.stderr)
    parts.close()
