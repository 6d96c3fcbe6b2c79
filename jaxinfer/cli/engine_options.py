"""The engine's options, the same for every subcommand: one for each field of EngineArgs."""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any

from jaxinfer.cli.human_int import human_int
from jaxinfer.startup.args import EngineArgs
from jaxinfer.startup.unbuilt import UNBUILT

PREFIX = "engine_"
# Functions and meshes cannot be written on a command line, and nothing here logs.
NO_OPTION = ("logits_processors", "disable_log_stats", "mesh", "axis_names")
_SHORT = {"data_parallel_size": ("-dp",), "tensor_parallel_size": ("-tp",)}  # vLLM's
_JSON_EXAMPLES = {
    "override_generation_config": '{"temperature": 0.7}',
    "quantization_config": '{"group_size": 64}',
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 5}',
}
_FLAG = re.compile(r"--(no-)?([a-z][a-z0-9-]*)(?:=(.*))?", re.DOTALL)


def add_engine_options(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Adds an option for each field of EngineArgs, with its description; `model` is required.

    Args:
        without: fields whose option the subcommand uses for something of its own.
    """
    group = parser.add_argument_group("engine options", "Sizes may be written 4096, 4k (4000) or 4K (4096).")
    texts = field_texts(EngineArgs)
    for item in fields(EngineArgs):
        if item.name not in (*NO_OPTION, *without):
            group.add_argument(
                *_SHORT.get(item.name, ()),
                f"--{item.name.replace('_', '-')}",
                dest=PREFIX + item.name,
                default=argparse.SUPPRESS,
                required=item.name == "model",
                help=_help(item, texts),
                **_reader(item),
            )


def engine_args(arguments: argparse.Namespace, **fixed: Any) -> EngineArgs:
    """The settings that were given.

    Args:
        fixed: further settings, which the subcommand chooses.

    Raises:
        ValueError, TypeError: one is refused.
    """
    values = {name.removeprefix(PREFIX): value for name, value in vars(arguments).items() if name.startswith(PREFIX)}
    if values.get("compilation_cache_dir") == "none":
        values["compilation_cache_dir"] = False
    values = {"use_tqdm_on_load": sys.stderr.isatty(), **values, **fixed}
    return EngineArgs(values.pop("model"), **values)


def unbuilt_options(words: Sequence[str]) -> dict[str, Any]:
    """What the parser did not know, as arguments of vLLM's that EngineArgs can refuse with the reason.

    Raises:
        ValueError: a word is no such option either.
    """
    values: dict[str, Any] = {}
    name = None
    for word in words:
        match = _FLAG.fullmatch(word)
        if match is None and name is not None:
            values[name], name = _value(word), None
            continue
        name = match[2].replace("-", "_") if match else ""
        if match is None or name not in UNBUILT:
            raise ValueError(f"unrecognized arguments: {' '.join(words)}")
        values[name] = match[1] is None if match[3] is None else _value(match[3])
        name = name if match[3] is None else None
    return {PREFIX + name: value for name, value in values.items()}


def field_texts(kind: type) -> dict[str, str]:
    """Name of each argument -> its description in the docstring's Args section; empty without docstrings (-OO)."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", inspect.cleandoc(kind.__doc__ or ""), re.MULTILINE)
    entries = re.findall(r"^    (\w+): ((?:.*\n?)(?:^ {8}.*\n?)*)", section[1], re.MULTILINE) if section else []
    return {name: " ".join(text.split()) for name, text in entries}


def json_object(example: str) -> Callable[[str], Mapping[str, Any]]:
    """A reader of JSON objects, whose refusals say what one looks like."""

    def read(text: str) -> Mapping[str, Any]:
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, Mapping):
            raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object, such as '{example}'")
        return value

    return read


def _help(item: Field[Any], texts: Mapping[str, str]) -> str:
    text = texts.get(item.name, "").replace("None only where live parameters are given instead.", "").strip()
    if item.name == "compilation_cache_dir":
        text = "folder where compiled programs are kept for the next start, or 'none'; by default in the cache folder."
    if item.name == "use_tqdm_on_load":
        return f"{text} By default on a terminal only."
    shown = item.default not in (None, "") and not isinstance(item.default, bool)
    return text.replace("%", "%%") + (f" Default: {item.default}." if shown else "")


def _reader(item: Field[Any]) -> dict[str, Any]:
    """How argparse reads the field's value."""
    if item.type in (int, int | None):
        return {"type": human_int, "metavar": "N"}
    if item.type is float:
        return {"type": float, "metavar": "SHARE"}
    if item.type is bool:
        return {"action": argparse.BooleanOptionalAction}
    if item.name in _JSON_EXAMPLES:
        return {"type": json_object(_JSON_EXAMPLES[item.name]), "metavar": "JSON"}
    if item.name == "num_speculative_tokens":
        return {"type": _int_or_auto, "metavar": "N|auto"}
    choices = {
        "dtype": "DTYPE",
        "quantization": "METHOD",
        "scheduling_policy": "{fcfs,priority}",
        "tokenizer_mode": "auto",
        "hf_token": "TOKEN",
    }
    return {"metavar": choices.get(item.name, item.name.split("_")[-1].upper())}


def _int_or_auto(text: str) -> int | str:
    return text if text == "auto" else human_int(text)


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return {"true": True, "false": False, "none": None}.get(word.lower(), word)
