"""Reading what to learn from: plain text, or JSON lines with texts, prompts or conversations."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.tokenizers.tokenizer import Tokenizer

KEYS = ("text", "prompt", "messages")
Row = Mapping[str, Any]


def read_rows(files: Sequence[Path]) -> list[Row]:
    """The contents of text files (a row each) and of .jsonl files (a row a line).

    A line is a JSON object with one of "text", "prompt" (with "completion", or without) and "messages" (a conversation
    as chat templates take it); other keys are not looked at.

    Raises:
        ValueError: a file is not UTF-8, a line is no such object (by number), or there are no rows.
        OSError: a file cannot be read.
    """
    rows = [row for file in files for row in _rows_of(file)]
    if not rows:
        raise ValueError(f"{', '.join(map(str, files))}: there is nothing in it")
    return rows


def encode_rows(rows: Sequence[Row], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Token ids of whole texts: a text with the model's BOS and EOS tokens, a prompt and its completion with EOS, a
    conversation as the chat template writes it.

    Raises:
        ValueError: the template refuses a conversation, or there is none.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for row in rows:
        if "messages" in row:
            yield _chat(tokenizer, row["messages"], answer=False)
            continue
        text = row["text"] if "text" in row else row["prompt"] + row.get("completion", "")
        ids = tokenizer.encode(text)
        yield ids if ids[-1:] == end else ids + end


def encode_prompts(rows: Sequence[Row], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Token ids of what is to be answered: a prompt or text as it is, a conversation up to its last user's message
    with the header of the answer.

    Raises:
        ValueError: as `encode_rows`; or a conversation without a message of a user.
    """
    for row in rows:
        if "messages" not in row:
            yield tokenizer.encode(row.get("prompt", row.get("text")))
            continue
        messages = row["messages"]
        last = max((place for place, message in enumerate(messages) if message.get("role") == "user"), default=None)
        if last is None:
            raise ValueError(f"a conversation has no message of a user to be answered: {str(messages)[:80]}")
        yield _chat(tokenizer, messages[: last + 1], answer=True)


def _chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, answer: bool) -> list[int]:
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=answer)
    assert not isinstance(ids, str)
    return ids


def _rows_of(file: Path) -> Iterator[Row]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 ({error.reason} at byte {error.start})") from None
    if file.suffix != ".jsonl":
        if text.strip():
            yield {"text": text}
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield _checked(f"{file}, line {number}", line)


def _checked(place: str, line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: not JSON ({error})") from None
    found = [key for key in KEYS if isinstance(row, dict) and key in row]
    if len(found) != 1:
        raise ValueError(f"{place}: an object with one of {', '.join(KEYS)} is expected; it has {found or 'none'}")
    messages = found == ["messages"]
    if messages and not (
        isinstance(row["messages"], list) and row["messages"] and all(isinstance(m, dict) for m in row["messages"])
    ):
        raise ValueError(f"{place}: messages must be a list of objects with role and content")
    if not messages and not isinstance(row[found[0]], str):
        raise ValueError(f"{place}: {found[0]} must be a text, not {row[found[0]]!r}")
    if not isinstance(row.get("completion", ""), str):
        raise ValueError(f"{place}: completion must be a text, not {row['completion']!r}")
    return dict(row)
