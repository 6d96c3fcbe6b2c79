"""Files of texts, prompts and conversations."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.tokenizers.load import load_tokenizer
from jaxinfer.training.documents import encode_prompts, encode_rows, read_rows

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)


@pytest.fixture
def tokenizer(tmp_path: Path, byte_tokenizer_json: str) -> Any:
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json)
    special = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**special, "chat_template": TEMPLATE}))
    return load_tokenizer(tmp_path)


def test_rows_and_their_tokens(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    lines = [{"text": "abc"}, {"prompt": "p", "completion": "q", "id": 1}, {"messages": chat}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    rows = read_rows([tmp_path / "a.txt", tmp_path / "b.jsonl"])
    end = [257]
    expected = [[*b"one\ntwo", *end], [*b"abc", *end], [*b"pq", *end], [*b"<user>hi<assistant>yo"]]
    assert list(encode_rows(rows, tokenizer)) == expected
    prompts = [[*b"one\ntwo"], [*b"abc"], [*b"p"], [*b"<user>hi<answer>"]]
    assert list(encode_prompts(rows, tokenizer)) == prompts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ('{"txt": "a"}', "line 1: an object with one of text, prompt, messages is expected; it has none"),
        ('{"text": "a", "prompt": "b"}', "it has .'text', 'prompt'."),
        ('{"text": 3}', "line 1: text must be a text, not 3"),
        ('{"prompt": "a", "completion": 3}', "completion must be a text, not 3"),
        ('{"messages": []}', "messages must be a list of objects"),
        ("", "there is nothing in it"),
    ],
)
def test_unusable_lines(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        read_rows([tmp_path / "a.jsonl"])


def test_other_refusals(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8"):
        read_rows([tmp_path / "a.txt"])
    with pytest.raises(ValueError, match="no message of a user"):
        list(encode_prompts([{"messages": [{"role": "assistant", "content": "a"}]}], tokenizer))
