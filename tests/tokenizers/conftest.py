"""Small vocabularies trained on the spot, as files and as GGUF metadata."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, hello there; the dog said hello to the fox",
    "desc ribed described  two spaces and 12345 digits 67890",
    "a small vocabulary is enough for a small test of the tokenizer",
    "don't we'll I'm they're it's\n\nnew lines\tand tabs",
    "naïve café grüße 你好 世界 😀 🚀 日本語",
] * 4


@pytest.fixture(scope="session")
def bpe() -> tokenizers.Tokenizer:
    """Byte-level BPE of GPT-2's kind with 400 ids, <s> = 0, </s> = 1, <pad> = 2 (special), <tool> = 3 (not special)."""
    return _train_bpe()


def _train_bpe() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [tokenizers.AddedToken(text, special=text != "<tool>") for text in ("<s>", "</s>", "<pad>", "<tool>")]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@pytest.fixture(scope="session")
def wordpiece() -> tokenizers.Tokenizer:
    """A WordPiece vocabulary, whose decoder puts spaces between words."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@pytest.fixture(scope="session")
def spm_model() -> bytes:
    """A sentencepiece BPE model with byte fallback: 0 <unk>, 1 <s>, 2 </s>, 3..258 bytes, then pieces."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=out,
        model_type="bpe",
        vocab_size=360,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return out.getvalue()


@pytest.fixture(scope="session")
def spm(spm_model: bytes) -> sentencepiece.SentencePieceProcessor:
    """The library's own processor of `spm_model`."""
    return sentencepiece.SentencePieceProcessor(model_proto=spm_model)


@pytest.fixture(scope="session")
def spm_gguf(spm: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """`spm_model` as a GGUF file describes it."""
    ids = range(spm.vocab_size())

    def kind(i: int) -> int:
        return 2 if spm.is_unknown(i) else 3 if spm.is_control(i) else 6 if spm.is_byte(i) else 1

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [spm.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [spm.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="session")
def bpe_gguf(bpe: tokenizers.Tokenizer) -> dict[str, Any]:
    """`bpe` as a GGUF file describes it, with the pre-tokenizer "gpt-2"."""
    written = json.loads(bpe.to_str())
    tokens = {i: token for token, i in bpe.get_vocab().items()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [tokens[i] for i in range(len(tokens))],
        "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * (len(tokens) - 4),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in written["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    }


@pytest.fixture
def model_dir(tmp_path: Path) -> Callable[..., Path]:
    """`model_dir(backend_or_model_bytes, **files)`: a directory with the tokenizer and JSON or text files beside it."""

    def write(tokenizer: tokenizers.Tokenizer | bytes, **files: Any) -> Path:
        if isinstance(tokenizer, bytes):
            (tmp_path / "tokenizer.model").write_bytes(tokenizer)
        else:
            tokenizer.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            if isinstance(content, str):
                (tmp_path / f"{name}.jinja").write_text(content, encoding="utf-8")
            else:
                (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        return tmp_path

    return write
