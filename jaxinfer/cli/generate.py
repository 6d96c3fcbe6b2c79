"""`jaxinfer generate`: complete prompts from the command line."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.engine_loading import load
from jaxinfer.cli.engine_options import add_engine_options, engine_args
from jaxinfer.cli.sampling_options import add_sampling_options, sampling_params

if TYPE_CHECKING:
    from jaxinfer.cli.completion_output import CompletionWriter
    from jaxinfer.engine.replicas import AnyEngine
    from jaxinfer.engine.sampling_params import SamplingParams
    from jaxinfer.serving.inputs import TokenizedPrompt
    from jaxinfer.tokenizers.tokenizer import Tokenizer

MAX_TOKENS = 128
DESCRIPTION = f"""\
Completes one prompt or several at once and prints what the model writes.

One prompt gives its completion and nothing else. With several prompts or --n each completion is a block of its own
under a line that names it, in the order of the prompts, also with --stream: the first unfinished one is shown as it
grows, the others follow when it is complete. --json prints an object a line: one for each prompt when it is finished,
or with --stream one for each piece of text, with the prompt's "index" and the sample's "sample".

Without --max-tokens at most {MAX_TOKENS} tokens are generated.
"""


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "generate",
        help="complete prompts",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to complete; may be given several times. Without it standard input, up to a final line end, is one.",
    )
    parser.add_argument("--chat", action="store_true", help="answer each prompt as a user's message (chat template)")
    parser.add_argument("--system", metavar="TEXT", help="system message of --chat")
    parser.add_argument("--chat-template", metavar="FILE", help="Jinja template of --chat in place of the model's")
    parser.add_argument("--stream", action="store_true", help="print text as it is generated")
    parser.add_argument("--json", action="store_true", help="print JSON, one object a line")
    add_sampling_options(parser)
    add_engine_options(parser, without=("seed",))


def run(arguments: argparse.Namespace) -> int:
    """Returns 2 when a prompt was refused, 1 when one failed, else 0."""
    if not arguments.chat and (arguments.system is not None or arguments.chat_template is not None):
        raise ValueError("--system and --chat-template belong to --chat; add it")
    template = read_template(arguments.chat_template)
    prompts = arguments.prompt or [_standard_input()]
    args = engine_args(arguments)

    from jaxinfer.cli.completion_output import make_writer
    from jaxinfer.engine.sampling_params import RequestOutputKind

    params = sampling_params(arguments, {}, MAX_TOKENS)  # refuses what is wrong before anything is loaded
    if not arguments.json and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise ValueError("--logprobs and --prompt-logprobs are shown by --json only; add it")
    parts = load(args)
    params = sampling_params(arguments, parts.defaults, MAX_TOKENS)
    params.output_kind = RequestOutputKind.DELTA if arguments.stream else RequestOutputKind.FINAL_ONLY
    items = [_tokenize(prompt, arguments, template, parts.tokenizer) for prompt in prompts]
    writer = make_writer(prompts, params.n, as_json=arguments.json, stream=arguments.stream)
    status = _serve(parts.engine, items, params, writer)
    parts.close()
    return status


def _serve(
    engine: "AnyEngine", items: list["TokenizedPrompt"], params: "SamplingParams", writer: "CompletionWriter"
) -> int:
    """Hands every output to the writer; returns the exit status."""
    from jaxinfer.serving.request_loop import RequestLoop

    status = 0
    with RequestLoop(engine) as loop:
        for index, item in enumerate(items):
            try:
                loop.add(str(index), item, params)
            except ValueError as error:
                status = 2
                writer.refuse(index, str(error))
        while len(loop):
            for output in loop.step():
                if output.error is None:
                    writer.write(int(output.request_id), output)
                else:
                    status = status or 1
                    writer.refuse(int(output.request_id), output.error)
    return status


def _tokenize(
    text: str, arguments: argparse.Namespace, template: str | None, tokenizer: "Tokenizer | None"
) -> "TokenizedPrompt":
    """A prompt as it is, or as the message of a conversation."""
    from jaxinfer.serving.inputs import render_chat, tokenize_prompt

    if not arguments.chat:
        return tokenize_prompt(text, tokenizer)
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    return render_chat([*system, {"role": "user", "content": text}], tokenizer, chat_template=template)


def read_template(source: str | None) -> str | None:
    """A chat template from a file, or the text itself where it is no file's name."""
    if source is None or "{" in source:
        return source
    with open(source, encoding="utf-8") as file:
        return file.read()


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise ValueError("no prompt: give --prompt TEXT, or write it to standard input")
    return sys.stdin.read().removesuffix("\n")  # echo and editors end every text with one
