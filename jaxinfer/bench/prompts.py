"""Prompts that benchmarks use when they are given none, and those of files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it line by line.",
    "Repeat this sentence five times: The quick brown fox jumps over the lazy dog.",
    "What should I pack for a three-day walk in the mountains in October?",
    "Write the numbers from one to thirty in words, separated by commas.",
    "Write a short story about a lighthouse keeper and a lost ship.",
    "Copy this list twice, one item a line: apples, pears, plums, cherries, quinces, figs, dates, grapes.",
    "Summarise the rules of chess for someone who has never played.",
)


def read_prompts(path: Path) -> list[str | Sequence[Mapping[str, Any]]]:
    """Texts, or conversations, of a file.

    Args:
        path: .json, a list of texts or of conversations; .jsonl, on each line a text, or an object with "prompt" or
            "messages"; any other, a text on each line.

    Raises:
        ValueError: it holds something else, or nothing; names the file.
        OSError: it cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        if path.suffix == ".json":
            found = json.loads(text)
        else:
            found = [json.loads(line) for line in lines] if path.suffix == ".jsonl" else lines
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, list) or not found:
        raise ValueError(f"{path} holds no list of prompts")
    return [_prompt(path, number, item) for number, item in enumerate(found, 1)]


def _prompt(path: Path, number: int, item: Any) -> str | Sequence[Mapping[str, Any]]:
    if isinstance(item, Mapping):
        item = item.get("messages", item.get("prompt"))
    is_conversation = isinstance(item, list) and item and all(isinstance(message, Mapping) for message in item)
    if not is_conversation and not (isinstance(item, str) and item):
        raise ValueError(f'{path}: prompt {number} is no text, nor an object with "prompt" or "messages"')
    return item
