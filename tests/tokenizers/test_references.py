"""Ids of texts that are hard to cut, as llama.cpp and transformers give them: data/make_tokenizer_references.py."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from jaxinfer.tokenizers.gguf import GGUFTokenizer
from jaxinfer.tokenizers.gguf_files import write_gguf_tokenizer
from jaxinfer.tokenizers.load import load_tokenizer
from jaxinfer.tokenizers.tokenizer import Tokenizer

REFERENCES = json.loads((Path(__file__).parents[1] / "data" / "tokenizers.json").read_text(encoding="utf-8"))
TEXTS = REFERENCES["texts"]
PRE_TOKENIZERS = [(name, group["expected"]) for group in REFERENCES["pre_tokenizers"] for name in group["names"]]
GGUF, DIRECTORIES = REFERENCES["gguf"], REFERENCES["directories"]


def model(name: str) -> bytes:
    return base64.b64decode(REFERENCES["sentencepiece"][name])


def check(tokenizer: Any, expected: dict[str, Any]) -> None:
    """All texts, with exactly one BOS where the reference puts one."""
    for i, text in enumerate(TEXTS):
        ids = expected["ids"][i]
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        first = [] if ids[:1] == [tokenizer.bos_token_id] else expected["bos"]
        assert tokenizer.encode(text) == first + ids, text
        if "split" in expected:
            assert tokenizer.encode(text, False, split_special_tokens=True) == expected["split"][i], text
        if "texts" in expected:
            assert tokenizer.decode(ids, skip_special_tokens=True) == expected["texts"][i], text


@pytest.mark.parametrize(("pre", "expected"), PRE_TOKENIZERS, ids=[name for name, _ in PRE_TOKENIZERS])
def test_byte_level_ids_equal_llama_cpp(pre: str, expected: dict[str, Any]) -> None:
    tokenizer = GGUFTokenizer.from_metadata(REFERENCES["bpe"] | {"tokenizer.ggml.pre": pre})
    check(tokenizer, expected)
    for text, ids in zip(TEXTS, expected["ids"], strict=True):
        assert tokenizer.decode(ids) == text


def gguf_fields(case: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a GGUF file of the case's sentencepiece model; turns are control tokens in it."""
    spm = sentencepiece.SentencePieceProcessor(model_proto=model(case["model"]))
    ids, added = range(spm.vocab_size()), case["added"]
    tokens = [spm.id_to_piece(i) for i in ids]

    def kind(i: int) -> int:
        if spm.is_control(i) or tokens[i].endswith("_of_turn>"):
            return 3
        own = case["model"] == "gemma" and (not tokens[i].strip("\n") or tokens[i] in ("▁▁", "▁▁▁"))
        return 2 if spm.is_unknown(i) else 6 if spm.is_byte(i) else 4 if own else 1

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *added],
        "tokenizer.ggml.token_type": [*map(kind, ids), *(4 if text == "<|extra|>" else 3 for text in added)],
        "tokenizer.ggml.scores": [spm.get_score(i) for i in ids] + [-1000.0] * len(added),
        "tokenizer.ggml.bos_token_id": spm.bos_id(),
        "tokenizer.ggml.eos_token_id": spm.eos_id(),
        "tokenizer.ggml.unknown_token_id": spm.unk_id(),
        **case["fields"],
    }


@pytest.mark.parametrize("name", GGUF)
def test_sentencepiece_ids_equal_llama_cpp(name: str, tmp_path: Path) -> None:
    fields = gguf_fields(GGUF[name])
    check(GGUFTokenizer.from_metadata(fields), GGUF[name])
    write_gguf_tokenizer(fields, tmp_path)
    check(load_tokenizer(tmp_path), GGUF[name])


@pytest.mark.parametrize("name", DIRECTORIES)
def test_directory_ids_equal_transformers(name: str, model_dir: Callable[..., Path]) -> None:
    case = DIRECTORIES[name]
    tokenizer: Tokenizer = load_tokenizer(model_dir(model(case["model"]), tokenizer_config=case["config"]))
    check(tokenizer, case)
