"""The `jaxinfer` command."""

import argparse
import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TextIO

from jaxinfer._version import __version__
from jaxinfer.cli import batch, bench, chat, collect_env, convert, distill, eval, generate, inspect, plan, quantize
from jaxinfer.cli.engine_options import unbuilt_options

EPILOG = """\
Exit status: 0 done, 1 the engine failed, 2 bad input, 130 stopped with Ctrl-C, 141 whoever read the output has left,
143 stopped with SIGTERM.
Environment: JAXINFER_CACHE_DIR is where models and compiled programs are kept; JAXINFER_TRACEBACK=1 shows where an
error was raised.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the words after the program's name; None takes sys.argv's.

    Returns:
        The exit status. What a command raises is written as one line, except with JAXINFER_TRACEBACK set.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a character that the locale lacks ends no command
    status = _status(sys.argv[1:] if argv is None else argv)
    try:
        sys.stdout.flush()
    except OSError:
        # Whoever read the output has left, or the disk is full: nothing may be written to it any more, at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; `run` of what it returns is the subcommand's function."""
    parser = argparse.ArgumentParser(
        prog="jaxinfer",
        description="LLM inference in JAX.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"jaxinfer {__version__}")
    commands = parser.add_subparsers(title="subcommands", metavar="COMMAND", required=True)
    for module in (generate, chat, batch, bench, eval, convert, quantize, distill, inspect, plan, collect_env):
        module.add_parser(commands)
    return parser


def _status(words: Sequence[str]) -> int:
    try:
        status = _run(words)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141
    except (ValueError, TypeError, OSError) as error:
        return _report(error, 2)
    except RuntimeError as error:
        return _report(error, 1)


def _run(words: Sequence[str]) -> int:
    parser = build_parser()
    if not words:
        parser.print_help(sys.stderr)
        return 2
    try:
        arguments = _parse(parser, words)
    except SystemExit as stop:  # argparse has written help, the version or what is wrong
        return stop.code if isinstance(stop.code, int) else 2
    with _plain_warnings():
        status: int = arguments.run(arguments)
    return status


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """What is told to the user is one line, without a place in the source; it is shown unless Python's own options say
    otherwise."""
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("default", UserWarning)
        before = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if category is UserWarning:
                print(f"jaxinfer: warning: {message}", file=sys.stderr)
            else:
                before(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def _parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The arguments; options of vLLM's that are not built are handed on, to be refused with the reason."""
    arguments, unknown = parser.parse_known_args(words)
    if not unknown:
        return arguments
    try:
        given = unbuilt_options(unknown)
    except ValueError as error:
        parser.error(str(error))
    if not hasattr(arguments, "engine_model"):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    vars(arguments).update(given)
    return arguments


def _report(error: Exception, status: int) -> int:
    if os.environ.get("JAXINFER_TRACEBACK"):
        raise error
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    print(f"jaxinfer: error: {error or type(error).__name__}", file=sys.stderr)
    return status
