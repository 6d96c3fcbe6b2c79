"""tokenizer.model directories against the sentencepiece library."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.tokenizers.load import load_tokenizer
from jaxinfer.tokenizers.sentencepiece import SentencePieceTokenizer

Processor = sentencepiece.SentencePieceProcessor
ModelDir = Callable[..., Path]


@settings(deadline=None)
@given(text=st.text("the fox▁\n é你😀123<>"))
def test_ids_and_text_equal_the_library(spm: Processor, spm_model: bytes, text: str) -> None:
    tokenizer = SentencePieceTokenizer(spm_model)
    ids = spm.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.encode(text) == [1, *ids]
    assert tokenizer.decode([1, *ids, 2], skip_special_tokens=True) == spm.decode(ids)


def test_half_a_surrogate_pair_is_refused(spm_model: bytes) -> None:
    with pytest.raises(ValueError, match=r"holds '\\udfff' at character 0, half of a surrogate pair"):
        SentencePieceTokenizer(spm_model).encode("\udfff hi")


@pytest.mark.parametrize(
    ("config", "start", "end"),
    [
        ({}, [1], []),
        ({"add_bos_token": False}, [], []),
        ({"add_eos_token": True}, [1], [2]),
        ({"add_bos_token": False, "add_eos_token": True}, [], [2]),
    ],
)
def test_bos_and_eos_by_config(
    spm: Processor, spm_model: bytes, model_dir: ModelDir, config: dict[str, Any], start: list[int], end: list[int]
) -> None:
    tokenizer = load_tokenizer(model_dir(spm_model, tokenizer_config=config))
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert tokenizer.encode("hello") == [*start, *spm.encode("hello"), *end]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, None)


def test_text_that_begins_with_bos_gets_no_second(spm: Processor, spm_model: bytes) -> None:
    tokenizer = SentencePieceTokenizer(spm_model)
    ids = tokenizer.encode("<s>hello")
    assert ids.count(1) == 1 and ids[0] == 1
    assert tokenizer.encode("<s>hello", split_special_tokens=True) == [1, *spm.encode("<s>hello")]
    assert spm.encode("<s>hello").count(1) == 0


def test_space_after_added_tokens(spm: Processor, spm_model: bytes) -> None:
    """Not legacy: only the start of the whole text gets the space (Hugging Face's `legacy` setting)."""
    bare = SentencePieceTokenizer(spm_model).encode("hello</s>the")
    assert "".join(map(spm.id_to_piece, bare)) == "<s>▁hello</s>the"
    legacy = SentencePieceTokenizer(spm_model, prefix_every_segment=True).encode("hello</s>the")
    assert legacy == [1, *spm.encode("hello"), 2, *spm.encode("the")]


def test_added_tokens(spm: Processor, spm_model: bytes, model_dir: ModelDir) -> None:
    n = spm.vocab_size()
    config = {
        "legacy": False,
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": {
            "1": {"content": "<s>", "special": True},
            str(n): {"content": "<|im_end|>", "special": True},
            str(n + 1): {"content": "<tool>", "special": False},
        },
    }
    tokenizer = SentencePieceTokenizer.from_dir(model_dir(spm_model, tokenizer_config=config))
    assert tokenizer.vocab_size == n + 2
    assert tokenizer.eos_token_id == n
    assert tokenizer.all_special_ids == {0, 1, 2, n}
    ids = tokenizer.encode("<tool>hello<|im_end|>")
    assert ids[:2] == [1, n + 1] and ids[-1] == n
    assert tokenizer.decode(ids) == "<s><tool>hello<|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool>hello"
    assert n + 1 in tokenizer.encode("<tool>", split_special_tokens=True)


def test_longest_added_token_wins(spm: Processor, spm_model: bytes, model_dir: ModelDir) -> None:
    n = spm.vocab_size()
    tokenizer = load_tokenizer(model_dir(spm_model, added_tokens={"<a>": n, "<a>b": n + 1}))
    assert tokenizer.encode("<a>b<a>") == [1, n + 1, n]


def test_added_token_that_contradicts_the_model(spm_model: bytes, model_dir: ModelDir) -> None:
    path = model_dir(spm_model, added_tokens={"<mine>": 5})
    with pytest.raises(ValueError, match="tokenizer.model: added token '<mine>' has the id 5"):
        SentencePieceTokenizer.from_dir(path)


def test_one_token_as_text(spm: Processor, spm_model: bytes) -> None:
    tokenizer = SentencePieceTokenizer(spm_model)
    hello = next(i for i in range(spm.vocab_size()) if spm.id_to_piece(i) == "▁hello")
    assert tokenizer.token_text(hello) == " hello"
    assert tokenizer.token_text(3 + 0x41) == "A"
    assert tokenizer.token_text(3 + 0xC3) == "\ufffd"
    assert tokenizer.token_text(10**6) == tokenizer.token_text(-1) == ""


def test_chat_writes_its_own_bos(spm: Processor, spm_model: bytes, model_dir: ModelDir) -> None:
    template = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
    tokenizer = SentencePieceTokenizer.from_dir(model_dir(spm_model, chat_template=template))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert ids[0] == 1 and ids.count(1) == 1
    assert tokenizer.decode(ids[1:]) == "[INST] hello [/INST]"


def test_damaged_model_is_named(spm_model: bytes, model_dir: ModelDir) -> None:
    with pytest.raises(ValueError, match="tokenizer.model: not a valid sentencepiece model"):
        SentencePieceTokenizer.from_dir(model_dir(b"\x0a\xff\xff" + spm_model[:40]))


def test_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer.model is missing"):
        SentencePieceTokenizer.from_dir(tmp_path)
