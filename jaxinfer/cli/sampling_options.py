"""Options that become SamplingParams, for the subcommands that take prompts from the command line."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.engine_options import field_texts, json_object
from jaxinfer.cli.human_int import human_int

if TYPE_CHECKING:
    from jaxinfer.engine.sampling_params import SamplingParams

PREFIX = "sampling_"


def _max_tokens(text: str) -> int | None:
    return None if text.lower() == "none" else human_int(text)


_READERS: Mapping[str, Mapping[str, Any]] = {
    "max_tokens": {"type": _max_tokens, "metavar": "N"},
    "temperature": {"type": float, "metavar": "T"},
    "top_p": {"type": float, "metavar": "P"},
    "top_k": {"type": human_int, "metavar": "K"},
    "min_p": {"type": float, "metavar": "P"},
    "seed": {"type": int, "metavar": "N"},
    "n": {"type": human_int, "metavar": "N"},
    "stop": {"action": "append", "metavar": "TEXT"},
    "stop_token_ids": {"type": int, "nargs": "+", "metavar": "ID"},
    "ignore_eos": {"action": "store_true"},
    "min_tokens": {"type": human_int, "metavar": "N"},
    "logprobs": {"type": int, "metavar": "K"},
    "prompt_logprobs": {"type": int, "metavar": "K"},
    "presence_penalty": {"type": float, "metavar": "X"},
    "frequency_penalty": {"type": float, "metavar": "X"},
    "repetition_penalty": {"type": float, "metavar": "X"},
    "logit_bias": {"type": json_object('{"42": -100}'), "metavar": "JSON"},
    "allowed_token_ids": {"type": int, "nargs": "+", "metavar": "ID"},
    "bad_words": {"action": "append", "metavar": "WORD"},
    "include_stop_str_in_output": {"action": "store_true"},
    "skip_special_tokens": {"action": argparse.BooleanOptionalAction},
}
_REPEATABLE = " May be given several times."


def add_sampling_options(parser: argparse.ArgumentParser, without: tuple[str, ...] = ()) -> None:
    """Adds an option for each field of SamplingParams that makes sense on a command line, except `without`."""
    from jaxinfer.engine.sampling_params import SamplingParams

    group = parser.add_argument_group(
        "sampling options",
        "What is left out comes from the model's generation config, else from vLLM's defaults. '--max-tokens none' sets"
        " no limit but the model's length.",
    )
    texts = field_texts(SamplingParams)
    for name, reader in _READERS.items():
        if name not in without:
            text = texts.get(name, "") + (_REPEATABLE if reader.get("action") == "append" else "")
            group.add_argument(
                f"--{name.replace('_', '-')}",
                dest=PREFIX + name,
                default=argparse.SUPPRESS,
                help=text.replace("%", "%%"),
                **reader,
            )


def sampling_params(
    arguments: argparse.Namespace, defaults: Mapping[str, Any], max_tokens: int | None
) -> "SamplingParams":
    """The parameters that were given, over the model's.

    Args:
        defaults: fields that the model's generation config sets.
        max_tokens: used where neither says it.

    Raises:
        ValueError, TypeError: a value is refused.
    """
    from jaxinfer.engine.sampling_params import SamplingParams

    given = {name.removeprefix(PREFIX): value for name, value in vars(arguments).items() if name.startswith(PREFIX)}
    return SamplingParams(**{"max_tokens": max_tokens, **defaults, **given})
