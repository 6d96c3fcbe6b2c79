"""The tokenizer inside a GGUF file, from its `tokenizer.*` metadata (ggml's gguf.md; llama.cpp is the reference)."""

import numbers
import warnings
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models

from jaxinfer.tokenizers.hf import HFTokenizer
from jaxinfer.tokenizers.pre_tokenizers import WHOLE_WORD_NAMES, pre_tokenizer
from jaxinfer.tokenizers.sentencepiece import SentencePieceTokenizer
from jaxinfer.tokenizers.sentencepiece_model import bpe_model
from jaxinfer.tokenizers.settings import AddedToken
from jaxinfer.tokenizers.tokenizer import Tokenizer

# tokenizer.ggml.token_type, the same numbers as in sentencepiece
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_ID_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",  # so spelled in the format
    "pad_token": "tokenizer.ggml.padding_token_id",
}


# What ends a turn or a text in models that people chat with. Files name one end, or none, and often say that these are
# ordinary text; llama.cpp goes by their spelling, too.
_ENDS = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>")
)
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# Phi-3's tokens take the whitespace behind them, which files cannot say; these do not.
_PHI3_PLAIN = frozenset(("<unk>", "<s>", "<|endoftext|>"))


class GGUFTokenizer:
    """Makes tokenizers from GGUF metadata; byte-level BPE (`gpt2`) and sentencepiece BPE (`llama`) models."""

    @staticmethod
    def from_metadata(fields: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer that a file's key-value fields describe.

        Args:
            fields: metadata keys -> Python values; arrays as sequences.

        Raises:
            ValueError: a field is missing, inconsistent or of a kind that is not supported; names the field.
        """
        model = _field(fields, "tokenizer.ggml.model")
        if model == "gpt2":
            return _byte_level(fields)
        if model == "llama":
            return _sentencepiece(fields)
        raise ValueError(
            f"tokenizer.ggml.model={model!r} is not supported, only 'gpt2' and 'llama' are; use the model's Hugging"
            " Face directory, or pass a tokenizer"
        )


def _field(fields: Mapping[str, Any], key: str) -> Any:
    if fields.get(key) is None:
        raise ValueError(
            f"GGUF field {key} is missing, without it there is no tokenizer; pass one, or get the file again"
        )
    return fields[key]


def _array(fields: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    """An array of strings or numbers; ValueError for anything else."""
    values = _field(fields, key)
    listed = hasattr(values, "__len__") and not isinstance(values, (str, bytes, Mapping))
    if not listed or not all(issubclass(found, kind) for found in set(map(type, values))):
        what = "strings" if kind is str else "numbers"
        raise ValueError(f"GGUF field {key} is no array of {what}; the file is damaged")
    return list(values)


def _token_id(fields: Mapping[str, Any], key: str) -> int | None:
    """An id, None where the file has none; ValueError for anything else."""
    value = fields.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
        raise ValueError(f"{key}={value!r} is not a token id; the file is damaged")
    return None if value is None else int(value)


def _tokens(fields: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Texts and types of all ids. No two have the same text, and what ends a turn is never ordinary text."""
    named = enumerate(_array(fields, "tokenizer.ggml.tokens", str))
    tokens = [token or f"[EMPTY_{i}]" for i, token in named]
    if len(set(tokens)) != len(tokens):
        first = next(token for i, token in enumerate(tokens) if token in tokens[:i])
        raise ValueError(f"tokenizer.ggml.tokens has {first!r} twice, which of its ids is meant?; get the file again")
    key = "tokenizer.ggml.token_type"
    types = [_NORMAL] * len(tokens) if fields.get(key) is None else _array(fields, key, numbers.Integral)
    if len(types) != len(tokens):
        raise ValueError(f"{key} has {len(types)} entries for {len(tokens)} tokens; the file is damaged")
    for i in map(tokens.index, _ENDS.intersection(tokens)):
        types[i] = _CONTROL
    return tokens, types


def end_ids(fields: Mapping[str, Any]) -> frozenset[int]:
    """The ids that end a generation: those that a file names, and those spelled like the end of a turn.

    Raises:
        ValueError: a field is of the wrong type; names it.
    """
    key = "tokenizer.ggml.tokens"
    tokens = [] if fields.get(key) is None else _array(fields, key, str)
    named = {token_id for key in _END_KEYS if (token_id := _token_id(fields, key)) is not None}
    return frozenset(named | set(map(tokens.index, _ENDS.intersection(tokens))))


def special_tokens(fields: Mapping[str, Any]) -> dict[str, str]:
    """Texts of a file's special tokens by their Hugging Face names.

    Raises:
        ValueError: an id is outside the vocabulary; names the field.
    """
    special, (tokens, _) = {}, _tokens(fields)
    for name, key in _ID_KEYS.items():
        token_id = _token_id(fields, key)
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise ValueError(f"{key}={token_id} is not an id of the {len(tokens)} tokens; the file is damaged")
        special[name] = tokens[token_id]
    return special


def chat_templates(fields: Mapping[str, Any]) -> dict[str, str]:
    """A file's chat templates by name, the main one as "default"."""
    prefix = "tokenizer.chat_template"
    named = {key[len(prefix) + 1 :]: str(text) for key, text in fields.items() if key.startswith(prefix + ".")}
    return named | ({"default": str(fields[prefix])} if prefix in fields else {})


def _merge(text: str) -> tuple[str, str]:
    # A token may hold spaces of its own, so the separator is the first space after the first character.
    at = text.find(" ", 1)
    if at < 0:
        raise ValueError(f"tokenizer.ggml.merges has {text!r}, which is no pair of tokens; the file is damaged")
    return text[:at], text[at + 1 :]


def _byte_level(fields: Mapping[str, Any]) -> HFTokenizer:
    tokens, types = _tokens(fields)
    pre = str(fields.get("tokenizer.ggml.pre") or "default")
    if not fields.get("tokenizer.ggml.pre"):
        warnings.warn(
            "GGUF field tokenizer.ggml.pre is missing, so text is cut into words by llama.cpp's default, which is few "
            "models' own; a newer file of the model gives better answers",
            stacklevel=4,
        )
    splitter = pre_tokenizer(pre)
    merges = [_merge(text) for text in _array(fields, "tokenizer.ggml.merges", str)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=pre in WHOLE_WORD_NAMES)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    for kinds, special in (((_CONTROL, _UNKNOWN), True), ((_USER_DEFINED,), False)):
        chosen = [token for token, kind in zip(tokens, types, strict=True) if kind in kinds]
        backend.add_tokens([tokenizers.AddedToken(token, normalized=False, special=special) for token in chosen])
    return HFTokenizer(
        backend,
        special_tokens=special_tokens(fields),
        templates=chat_templates(fields),
        add_bos_token=bool(fields.get("tokenizer.ggml.add_bos_token", pre in WHOLE_WORD_NAMES)),
        add_eos_token=bool(fields.get("tokenizer.ggml.add_eos_token", False)),
    )


def _sentencepiece(fields: Mapping[str, Any]) -> SentencePieceTokenizer:
    model = sentencepiece_model(fields)
    try:
        return SentencePieceTokenizer(
            model,
            special_tokens=special_tokens(fields),
            added_tokens=added_tokens(fields),
            templates=chat_templates(fields),
            add_bos_token=bool(fields.get("tokenizer.ggml.add_bos_token", True)),
            add_eos_token=bool(fields.get("tokenizer.ggml.add_eos_token", False)),
            prefix_every_segment=True,
        )
    except ValueError as error:
        raise ValueError(f"tokenizer.ggml.tokens: {error}") from error


def sentencepiece_model(fields: Mapping[str, Any]) -> bytes:
    """The serialised model of a file whose tokenizer is of the kind `llama`.

    Raises:
        ValueError: a field is missing or inconsistent; names the field.
    """
    tokens, types = _pieces(fields)
    scores = [float(score) for score in _array(fields, "tokenizer.ggml.scores", numbers.Real)]
    if len(scores) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens; the file is damaged"
        )
    add_prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    return bpe_model(tokens, scores, types, add_dummy_prefix=add_prefix)


def added_tokens(fields: Mapping[str, Any]) -> list[AddedToken]:
    """The pieces of such a file that are matched in the raw text, but for control pieces that are nothing more."""
    tokens, types = _pieces(fields)
    matched = [i for i, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)]
    takes = _takes_whitespace(fields)
    added = [
        AddedToken(i, tokens[i], special=types[i] != _USER_DEFINED, rstrip=takes and tokens[i] not in _PHI3_PLAIN)
        for i in matched
    ]
    return [token for token in added if token.rstrip or not token.special]


def _takes_whitespace(fields: Mapping[str, Any]) -> bool:
    name = str(fields.get("general.name", "")).lower()
    return fields.get("general.architecture") == "phi3" or "phi-3" in name or "phi3" in name


def _pieces(fields: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Texts and types of all ids; sentencepiece wants one to stand for what is unknown."""
    tokens, types = _tokens(fields)
    if _UNKNOWN not in types:
        unknown = _token_id(fields, "tokenizer.ggml.unknown_token_id") or 0
        if not 0 <= unknown < len(types):
            raise ValueError(f"tokenizer.ggml.unknown_token_id={unknown} is not an id of the {len(types)} tokens")
        types[unknown] = _UNKNOWN
    return tokens, types
