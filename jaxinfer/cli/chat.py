"""`jaxinfer chat`: a conversation with the model."""

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.engine_loading import load
from jaxinfer.cli.engine_options import add_engine_options, engine_args
from jaxinfer.cli.generate import read_template
from jaxinfer.cli.sampling_options import add_sampling_options, sampling_params

if TYPE_CHECKING:
    from jaxinfer.engine.sampling_params import SamplingParams
    from jaxinfer.startup.loading import EngineParts

DESCRIPTION = """\
A conversation with the model; each line is a message, answers appear as they are written.

Ctrl-C stops an answer, which stays in the conversation as far as it got (before its first token the message is
forgotten); at the prompt Ctrl-C or Ctrl-D leaves.
/reset begins a new conversation, /quit leaves. Without a terminal each line of standard input is a message, and only
the answers are printed. Without --max-tokens an answer may fill the model's length.
"""


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--system", metavar="TEXT", help="system message that begins the conversation")
    parser.add_argument("--chat-template", metavar="FILE", help="Jinja template in place of the model's")
    add_sampling_options(parser, without=("n", "logprobs", "prompt_logprobs"))
    add_engine_options(parser, without=("seed", "max_num_seqs"))


def run(arguments: argparse.Namespace) -> int:
    """Returns 2 when messages from a pipe were refused, 130 after Ctrl-C at the prompt, else 0."""
    args = engine_args(arguments, max_num_seqs=1)
    template = read_template(arguments.chat_template)

    sampling_params(arguments, {}, None)  # refuses what is wrong before anything is loaded
    parts = load(args)
    conversation = Conversation(parts, sampling_params(arguments, parts.defaults, None), arguments.system, template)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - input() gets line editing and a history, where Python was built with it
        print("Ctrl-C stops an answer, Ctrl-D leaves, /reset begins anew.", file=sys.stderr)
    status = 0
    while (message := _next_message(is_terminal)) is not None and message != "/quit":
        if message == "/reset":
            conversation.reset()
        elif message:
            try:
                conversation.answer(message)
            except ValueError as error:
                print(f"jaxinfer: {error}", file=sys.stderr)
                status = 0 if is_terminal else 2
    parts.close()
    return status


class Conversation:
    """The messages so far, and the engine that answers them.

    Args:
        parts: the engine and its tokenizer.
        params: of every answer.
        system: text of the system message, None for none.
        template: chat template in place of the model's.
    """

    def __init__(
        self, parts: "EngineParts", params: "SamplingParams", system: str | None, template: str | None
    ) -> None:
        from jaxinfer.engine.sampling_params import RequestOutputKind

        self._parts = parts
        self._params = params
        self._params.output_kind = RequestOutputKind.DELTA
        self._template = template
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._num_answers = 0
        self.reset()

    def reset(self) -> None:
        """Forgets all but the system message."""
        self._messages = self._system

    def answer(self, message: str) -> None:
        """Writes the answer to standard output as it grows; Ctrl-C ends it there.

        Raises:
            ValueError: the message is refused (too long, for instance) and not part of the conversation.
            KeyboardInterrupt: a second Ctrl-C, or one while messages come from a pipe.
        """
        from jaxinfer.serving.inputs import render_chat

        asked = [*self._messages, {"role": "user", "content": message}]
        prompt = render_chat(asked, self._parts.tokenizer, chat_template=self._template)
        pieces: list[str] = []
        try:
            self._stream(prompt, pieces)
        except KeyboardInterrupt:
            print(" ...", flush=True)
            # A second Ctrl-C before the step ended has cost the engine its cache; from a pipe nobody wants the rest.
            if self._parts.engine.is_dead or not sys.stdin.isatty():
                raise
        else:
            print(flush=True)
        if pieces:
            self._messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]

    def _stream(self, prompt: Any, pieces: list[str]) -> None:
        from jaxinfer.serving.request_loop import RequestLoop

        self._num_answers += 1
        with RequestLoop(self._parts.engine) as loop:
            loop.add(str(self._num_answers), prompt, self._params)
            while len(loop):
                for output in loop.step():
                    if output.error is not None:
                        print(flush=True)
                        raise ValueError(output.error)
                    for sample in output.outputs:
                        pieces.append(sample.text)
                        print(sample.text, end="", flush=True)


def _next_message(is_terminal: bool) -> str | None:
    """The next line without blanks around it, None at the end of the input."""
    if is_terminal:
        try:
            return input("> ").strip()
        except EOFError:
            print()
            return None
    line = sys.stdin.readline()
    return line.strip() if line else None
