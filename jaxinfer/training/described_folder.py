"""A folder that several runs may share, and a file in it that says what it holds."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinfer.checkpoint.output_directory import sync_entry


def describe_folder(folder: Path, name: str, identity: Mapping[str, Any]) -> None:
    """Makes the folder and its description, or checks the one that is there.

    Args:
        folder: where it is, or will be.
        name: of the description's file.
        identity: of JSON's types: what the contents depend on, by names that users know.

    Raises:
        ValueError: the folder holds something else; names the difference.
    """
    path = folder / name
    wanted = json.loads(json.dumps(dict(identity)))
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(wanted, indent=2))
        return
    there = json.loads(path.read_text(encoding="utf-8"))
    for key in {**there, **wanted}:
        if there.get(key) != wanted.get(key):
            raise ValueError(
                f"{folder} was made with {key}={there.get(key)!r}; this run has {key}={wanted.get(key)!r}: give "
                "another folder, or remove it"
            )


def write_whole(path: Path, text: str) -> None:
    """Writes a file that appears when it is whole."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    sync_entry(fresh)
    fresh.replace(path)
