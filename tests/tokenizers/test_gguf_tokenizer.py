"""Tokenizers inside GGUF files, against llama.cpp's ids and against the libraries they are rebuilt with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers

from jaxinfer.tokenizers.detokenizer import Detokenizer
from jaxinfer.tokenizers.gguf import GGUFTokenizer, end_ids
from jaxinfer.tokenizers.load import load_tokenizer
from jaxinfer.tokenizers.pre_tokenizers import pre_tokenizer
from jaxinfer.tokenizers.tokenizer import Tokenizer

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_tokenization.json").read_text(encoding="utf-8"))
TEXTS = ["", " ", "hello world", "  two", "the fox\n\tran", "café 你好 😀🚀", "it's 12345", "<tool>hi", "naïve grüße"]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.mark.real_model
def test_smollm2_ids_equal_llama_cpp(smollm2: Any) -> None:
    assert len(GOLDEN["tokenization"]) == 58
    for case in GOLDEN["tokenization"]:
        assert smollm2.encode(case["text"]) == case["ids"], case["text"]
        assert smollm2.encode(case["text"], split_special_tokens=True) == case["ids_no_special"], case["text"]


@pytest.mark.real_model
def test_smollm2_named_tokens(smollm2: Tokenizer) -> None:
    assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.pad_token_id) == (1, 2, 2)
    assert smollm2.vocab_size == 49152
    assert smollm2.all_special_ids == frozenset(range(17))
    assert smollm2.encode("hi")[0] != 1  # add_bos_token is false in the file


@pytest.mark.real_model
def test_smollm2_chat_prompts_equal_transformers(smollm2: Tokenizer, golden: Mapping[str, Any]) -> None:
    chats = [prompt for prompt in golden["prompts"] if prompt.get("messages")]
    assert chats
    for prompt in chats:
        assert smollm2.apply_chat_template(prompt["messages"]) == prompt["prompt_ids"]


@pytest.mark.real_model
def test_smollm2_pieces(smollm2: Tokenizer) -> None:
    assert smollm2.token_text(218) == "\ufffd"  # last byte of an emoji
    assert smollm2.token_text(260) == " the"
    assert smollm2.token_text(2) == "<|im_end|>"
    assert smollm2.token_text(10**9) == smollm2.token_text(-1) == ""


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("ids", "stop", "include", "text"),
    [
        ([33203], ["DE"], False, ""),
        ([33203], ["DE"], True, "DE"),
        ([2797, 5365, 458, 400], ["lo w"], False, "hel"),
        ([2797, 5365, 458, 400], ["lo w"], True, "hello w"),
        ([10813, 242, 218], ["😀"], False, ""),
    ],
)
def test_smollm2_stop_inside_tokens(
    smollm2: Tokenizer, ids: list[int], stop: list[str], include: bool, text: str
) -> None:
    detokenizer = Detokenizer(smollm2, [504], stop=stop, include_stop_str_in_output=include)
    found = next((s for s in map(detokenizer.append, ids) if s is not None), None)
    assert (found, detokenizer.text) == (stop[0], text)


def test_byte_level_equals_the_vocabulary_it_came_from(bpe: tokenizers.Tokenizer, bpe_gguf: dict[str, Any]) -> None:
    tokenizer = GGUFTokenizer.from_metadata(bpe_gguf)
    for text in TEXTS:
        ids = bpe.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.all_special_ids == {0, 1, 2}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)


@pytest.mark.parametrize(("flag", "pre", "bos"), [(True, "gpt-2", [0]), (None, "gpt-2", []), (None, "llama-bpe", [0])])
def test_byte_level_bos(bpe_gguf: dict[str, Any], flag: bool | None, pre: str, bos: list[int]) -> None:
    fields = bpe_gguf | {"tokenizer.ggml.pre": pre}
    if flag is not None:
        fields["tokenizer.ggml.add_bos_token"] = flag
    tokenizer = GGUFTokenizer.from_metadata(fields)
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == bos + plain
    assert tokenizer.encode("<s>hello") == [0, *plain]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}]) == [0, *plain]


# Expected words worked out by hand from the published expressions of each family.
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm", ["a", " ", "1", "2", "3", "4", " Don", "'", "T", " it", "'s", "  ", " x", "\n", "\n", "y"]),
        ("gpt-2", ["a", " 1234", " Don", "'", "T", " it", "'s", "  ", " x", "\n", "\n", "y"]),
        ("qwen2", ["a", " ", "1", "2", "3", "4", " Don", "'T", " it", "'s", "  ", " x", "\n\n", "y"]),
        ("llama-bpe", ["a", " ", "123", "4", " Don", "'T", " it", "'s", "  ", " x", "\n\n", "y"]),
        ("default", ["a", " ", "123", "4", " Don", "'", "T", " it", "'", "s", "  ", " x", "\n", "\n", "y"]),
    ],
)
def test_word_splitting(name: str, words: list[str]) -> None:
    spelled = [word for word, _ in pre_tokenizer(name).pre_tokenize_str("a 1234 Don'T it's   x\n\ny")]
    assert [word.replace("Ġ", " ").replace("Ċ", "\n") for word in spelled] == words


def test_llama_bpe_keeps_whole_words(bpe_gguf: dict[str, Any]) -> None:
    tokens = [*bpe_gguf["tokenizer.ggml.tokens"], "xqz"]  # no merge leads to it
    fields = bpe_gguf | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*bpe_gguf["tokenizer.ggml.token_type"], 1],
    }
    whole = GGUFTokenizer.from_metadata(fields | {"tokenizer.ggml.pre": "llama-bpe"})
    assert whole.encode("xqz", add_special_tokens=False) == [len(tokens) - 1]
    assert len(GGUFTokenizer.from_metadata(fields).encode("xqz")) == 3


def test_sentencepiece_equals_the_library(spm: sentencepiece.SentencePieceProcessor, spm_gguf: dict[str, Any]) -> None:
    tokenizer = GGUFTokenizer.from_metadata(spm_gguf)
    for text in TEXTS:
        assert tokenizer.encode(text) == [1, *spm.encode(text)]
        assert tokenizer.decode(spm.encode(text)) == spm.decode(spm.encode(text))


def test_sentencepiece_space_prefix(spm: sentencepiece.SentencePieceProcessor, spm_gguf: dict[str, Any]) -> None:
    """llama.cpp puts a space in front of every stretch of text after a special token, if the file wants any."""
    prefixed = GGUFTokenizer.from_metadata(spm_gguf)
    assert prefixed.encode("<s>hello</s>the") == [1, *spm.encode("hello"), 2, *spm.encode("the")]
    bare = GGUFTokenizer.from_metadata(spm_gguf | {"tokenizer.ggml.add_space_prefix": False})
    pieces = [spm.id_to_piece(i) for i in bare.encode("hello", add_special_tokens=False)]
    assert "".join(pieces) == "hello"
    assert bare.decode(bare.encode(" hello"), skip_special_tokens=True) == " hello"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "klingon"}, "tokenizer.ggml.pre='klingon'"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model='bert'"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.merges": ["hello klingons"]}, "tokenizer.ggml.merges does not fit"),
        ({"tokenizer.ggml.merges": ["hello"]}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 entries"),
        ({"tokenizer.ggml.eos_token_id": 400}, "tokenizer.ggml.eos_token_id=400"),
        ({"tokenizer.ggml.eos_token_id": [1]}, r"tokenizer.ggml.eos_token_id=\[1\] is not a token id"),
        ({"tokenizer.ggml.tokens": 7}, "tokenizer.ggml.tokens is no array of strings"),
        ({"tokenizer.ggml.tokens": ["a", 7]}, "tokenizer.ggml.tokens is no array of strings"),
        ({"tokenizer.ggml.merges": "a b"}, "tokenizer.ggml.merges is no array of strings"),
        ({"tokenizer.ggml.token_type": ["x"] * 400}, "tokenizer.ggml.token_type is no array of numbers"),
    ],
)
def test_bad_metadata_is_refused_by_name(bpe_gguf: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GGUFTokenizer.from_metadata(bpe_gguf | change)


def test_bad_scores_are_refused(spm_gguf: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tokenizer.ggml.scores has 1 entries"):
        GGUFTokenizer.from_metadata(spm_gguf | {"tokenizer.ggml.scores": [0.0]})


def test_missing_pre_tokenizer_is_the_default_with_a_warning(bpe_gguf: dict[str, Any]) -> None:
    fields = {key: value for key, value in bpe_gguf.items() if key != "tokenizer.ggml.pre"}
    named = GGUFTokenizer.from_metadata(fields | {"tokenizer.ggml.pre": "default"})
    with pytest.warns(UserWarning, match="tokenizer.ggml.pre is missing"):
        unnamed = GGUFTokenizer.from_metadata(fields)
    assert unnamed.encode("it's 12345") == named.encode("it's 12345")


def with_tokens(fields: dict[str, Any], *texts: str) -> dict[str, Any]:
    """The same with further tokens of the normal type."""
    more: dict[str, list[Any]] = {"tokens": [*texts], "token_type": [1] * len(texts), "scores": [0.0] * len(texts)}
    keys = {f"tokenizer.ggml.{name}": values for name, values in more.items()}
    return fields | {key: [*fields[key], *values] for key, values in keys.items() if key in fields}


def test_what_ends_a_turn_is_told_by_its_spelling(bpe_gguf: dict[str, Any], spm_gguf: dict[str, Any]) -> None:
    """Files name one end and often call the others ordinary text; llama.cpp stops at all of them."""
    for fields in (bpe_gguf, spm_gguf):
        named = fields["tokenizer.ggml.eos_token_id"]
        changed = with_tokens(fields, "<end_of_turn>", "<|im_end|>")
        last = len(changed["tokenizer.ggml.tokens"]) - 1
        assert end_ids(fields) == {named}
        assert end_ids(changed) == {named, last - 1, last}
        tokenizer = GGUFTokenizer.from_metadata(changed)
        assert tokenizer.encode("a<end_of_turn><|im_end|>", add_special_tokens=False)[-2:] == [last - 1, last]
        assert tokenizer.decode([last - 1, last], skip_special_tokens=True) == ""
    assert end_ids({"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eom_token_id": 7}) == {0, 7}


def test_texts_of_two_ids_and_of_none(bpe_gguf: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tokenizer.ggml.tokens has '<tool>' twice"):
        GGUFTokenizer.from_metadata(with_tokens(bpe_gguf, "<tool>"))
    empty = GGUFTokenizer.from_metadata(with_tokens(bpe_gguf, "", ""))
    assert empty.vocab_size == len(bpe_gguf["tokenizer.ggml.tokens"]) + 2
    assert empty.token_text(empty.vocab_size - 1) == f"[EMPTY_{empty.vocab_size - 1}]"
