"""A reader of request bodies with a tokenizer of 258 tokens: bytes, <s> and </s>."""

import json
from pathlib import Path

import pytest

from jaxinfer.openai.request import RequestReader
from jaxinfer.tokenizers.load import load_tokenizer

# <user>hello ends with "#" where an answer is to follow.
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}#{% endif %}"


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer_json: str) -> RequestReader:
    """Serves "tiny", whose generation config says top_k=7."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(byte_tokenizer_json)
    special = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return RequestReader(load_tokenizer(folder), {"top_k": 7}, "tiny")
