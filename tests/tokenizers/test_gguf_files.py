"""A GGUF's tokenizer written as files: what is read from them gives the same ids and texts."""

import json
import random

import pytest

from jaxinfer.tokenizers.gguf import GGUFTokenizer
from jaxinfer.tokenizers.gguf_files import write_gguf_tokenizer
from jaxinfer.tokenizers.load import load_tokenizer

TEXTS = [
    "",
    " ",
    "hello",
    " hello  world\n\n",
    "héé 你好 😀",
    "<s>a</s> b <tool> c",
    "a<tool>b",
    "\x00\ttab",
    "1234 56",
]


def assert_same(left, right) -> None:
    rng = random.Random(0)
    alphabet = "helo wrd.,<s></s><tool>é你😀\n 019"
    texts = [*TEXTS, *("".join(rng.choices(alphabet, k=rng.randrange(40))) for _ in range(200))]
    for text in texts:
        for special in (True, False):
            ids = left.encode(text, special)
            assert right.encode(text, special) == ids, text
            for skip in (True, False):
                assert right.decode(ids, skip) == left.decode(ids, skip)
    assert [right.token_text(i) for i in range(left.vocab_size)] == [left.token_text(i) for i in range(left.vocab_size)]
    for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "all_special_ids", "chat_template"):
        assert getattr(right, name) == getattr(left, name), name


@pytest.fixture
def spm_fields():
    """A sentencepiece vocabulary with byte fallback, control tokens and a user-defined one."""
    tokens = ["<unk>", "<s>", "</s>", "<tool>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, 4, *[6] * 256]
    words = [
        "\u2581",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "he",
        "ll",
        "llo",
        "hello",
        "\u2581hello",
        "\u2581w",
        "é",
        "1",
        "12",
    ]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *words],
        "tokenizer.ggml.token_type": [*types, *[1] * len(words)],
        "tokenizer.ggml.scores": [0.0] * len(tokens) + [-float(i % 5) for i in range(len(words))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}é",
        "tokenizer.chat_template.tool_use": "tools",
    }
    return fields


@pytest.mark.parametrize("prefix", [True, False, None])
@pytest.mark.parametrize(
    "ends", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}], ids=str
)
def test_sentencepiece(prefix, ends, spm_fields, tmp_path):
    spm_fields |= {f"tokenizer.ggml.{key}": value for key, value in ends.items()}
    if prefix is not None:
        spm_fields["tokenizer.ggml.add_space_prefix"] = prefix
    write_gguf_tokenizer(spm_fields, tmp_path)
    assert (tmp_path / "tokenizer.model").exists()
    assert (tmp_path / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"
    assert_same(GGUFTokenizer.from_metadata(spm_fields), load_tokenizer(tmp_path))


@pytest.fixture
def bpe_fields(byte_tokenizer_json):
    vocabulary = json.loads(byte_tokenizer_json)["model"]["vocab"]
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__), "<s>", "</s>", "<tool>", "he", "ll", "hell", "Ġw"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 4] + [1] * 4,
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "Ġ w"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.padding_token_id": 257,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "default"])
@pytest.mark.parametrize(
    "ends", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}], ids=str
)
def test_byte_level(pre, ends, bpe_fields, tmp_path):
    bpe_fields |= {"tokenizer.ggml.pre": pre} | {f"tokenizer.ggml.{key}": value for key, value in ends.items()}
    write_gguf_tokenizer(bpe_fields, tmp_path)
    assert_same(GGUFTokenizer.from_metadata(bpe_fields), load_tokenizer(tmp_path))


def test_a_template_whose_name_is_a_path_stays_inside(bpe_fields, tmp_path):
    bpe_fields["tokenizer.chat_template.../../outside"] = "text"
    (tmp_path / "deep").mkdir()
    write_gguf_tokenizer(bpe_fields, tmp_path / "deep")
    assert (tmp_path / "deep" / "additional_chat_templates" / "outside.jinja").read_text() == "text"
    assert [entry.name for entry in tmp_path.iterdir()] == ["deep"]


def test_a_kind_that_is_not_supported_writes_nothing(tmp_path):
    with pytest.raises(ValueError, match="tokenizer.ggml.model='bert' is not supported"):
        write_gguf_tokenizer({"tokenizer.ggml.model": "bert"}, tmp_path)
    assert list(tmp_path.iterdir()) == []
