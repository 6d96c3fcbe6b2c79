"""Sampling defaults that come with a model, and the ids it names as ends."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinfer.engine.sampling_params import SamplingParams

SAMPLING_FIELDS = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""Entry of generation_config.json -> field of SamplingParams; other entries do not change sampling, as in vLLM."""


def check_override(entries: Any) -> None:
    """Refuses entries for a generation config that would change nothing.

    Raises:
        TypeError: not a mapping.
        ValueError: an entry that is not looked at.
    """
    if not isinstance(entries, Mapping):
        raise TypeError(f"override_generation_config={entries!r} must be a mapping")
    known = [*SAMPLING_FIELDS, "eos_token_id"]
    for name in entries:
        if name not in known:
            raise ValueError(
                f"override_generation_config holds {name!r}, which changes nothing; use {', '.join(known)}"
            )


def read_generation_config(choice: str | Path, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries that `EngineArgs.generation_config` means.

    Args:
        choice: "auto" for the model's own, "vllm" for none, else a folder with generation_config.json, or such a file.
        own: the model's.

    Raises:
        ValueError: there is no such file, or it is no JSON object.
    """
    if choice == "auto":
        return own
    if choice == "vllm":
        return {}
    path = Path(choice).expanduser()
    path = path / "generation_config.json" if path.is_dir() else path
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"generation_config={str(choice)!r} must be 'auto', 'vllm' or a folder with generation_config.json: {error}"
        ) from error
    if not isinstance(entries, Mapping):
        raise ValueError(f"{path} must hold a JSON object")
    return entries


def sampling_defaults(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of SamplingParams that the entries set.

    Raises:
        ValueError, TypeError: one has a value that SamplingParams refuses.
    """
    values = {field: entries[name] for name, field in SAMPLING_FIELDS.items() if entries.get(name) is not None}
    try:
        SamplingParams(**values)
    except (ValueError, TypeError) as error:
        raise type(error)(f"the generation config does not fit: {error}; give generation_config='vllm'") from error
    return values


def end_ids(entries: Mapping[str, Any]) -> frozenset[int]:
    """`eos_token_id` of the entries: one id or a list; 0 is an id like any other.

    Raises:
        ValueError: it is neither.
    """
    value = entries.get("eos_token_id")
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ValueError(f"the generation config's eos_token_id={value!r} must be a token id, a list of them, or null")
    return frozenset(ids)
