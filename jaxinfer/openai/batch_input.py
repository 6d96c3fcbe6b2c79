"""Input of a batch job: OpenAI's batch format, one request a line."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxinfer.openai.request import URLS

LINE_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class BatchLine:
    """One line of the input.

    Attributes:
        number: of the line, from 1.
        custom_id: the caller's name for it; None only when it cannot be read, and then `error` is set.
        url: which endpoint.
        body: request body, not checked yet.
        error: why the line cannot be served.
    """

    number: int
    custom_id: str | None = None
    url: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def key(self) -> str | int:
        """What the line's result is known by: the custom_id, the number where there is none."""
        return self.number if self.custom_id is None else self.custom_id


def read_batch(path: Path) -> Iterator[BatchLine]:
    """The lines of a file, empty ones left out.

    Raises:
        OSError: the file cannot be read.
    """
    for number, raw in raw_lines(path):
        yield parse_line(number, raw)


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The same lines as they are written, each with its number; raises as `read_batch`."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                yield number, raw


def batch_keys(path: Path) -> set[str | int]:
    """The keys of all lines.

    Raises:
        ValueError: two lines have the same custom_id.
    """
    lines_of: dict[str | int, int] = {}
    for line in read_batch(path):
        first = lines_of.setdefault(line.key, line.number)
        if first != line.number:
            raise ValueError(
                f"{path}: lines {first} and {line.number} have the same custom_id {line.custom_id!r}; it must be unique"
            )
    return set(lines_of)


def parse_line(number: int, raw: bytes) -> BatchLine:
    """Reads a line; what is wrong with it is in its `error`."""
    try:
        entry = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return BatchLine(number, error=f"line {number} is not JSON: {error}")
    if not isinstance(entry, dict):
        return BatchLine(number, error=f"line {number} is not a JSON object")
    custom_id = entry.get("custom_id")
    if not isinstance(custom_id, str):
        return BatchLine(number, error=f"line {number}: custom_id={custom_id!r} must be a string")
    fault = _check(entry)
    if fault is not None:
        return BatchLine(number, custom_id, error=fault)
    return BatchLine(number, custom_id, entry["url"], entry["body"])


def _check(entry: Mapping[str, Any]) -> str | None:
    """What is wrong with a line that has a custom_id, None for nothing."""
    unknown: Collection[str] = [name for name in entry if name not in LINE_FIELDS]
    if unknown:
        return f"{', '.join(unknown)}: unknown field of a batch line; it has {', '.join(LINE_FIELDS)}"
    if entry.get("method") != "POST":
        return f"method={entry.get('method')!r} must be 'POST'"
    if entry.get("url") not in URLS:
        return f"url={entry.get('url')!r} is not served; use {' or '.join(URLS)}"
    if not isinstance(entry.get("body"), dict):
        return f"body={entry.get('body')!r} must be a JSON object"
    return None
