"""Tokenizers that run as a pipeline of the `tokenizers` library: a Hugging Face directory's, or one built in memory."""

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from jaxinfer.tokenizers.chat import ChatTemplates
from jaxinfer.tokenizers.pieces import BytePieces, SentencePieces
from jaxinfer.tokenizers.settings import AddedToken, TokenizerSettings
from jaxinfer.tokenizers.tokenizer import check_text


class HFTokenizer:
    """A `tokenizers` pipeline with named special tokens and chat templates.

    Args:
        backend: the pipeline; the tokenizer takes it over (padding and truncation are switched off).
        special_tokens: names such as ``bos_token`` -> text; one whose text is not in the vocabulary is ignored.
        templates: chat templates by name.
        add_bos_token, add_eos_token: whether `encode` adds them; None leaves it to the pipeline.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        templates: Mapping[str, str],
        add_bos_token: bool | None = None,
        add_eos_token: bool | None = None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._special_tokens = {k: v for k, v in special_tokens.items() if backend.token_to_id(v) is not None}
        added = backend.get_added_tokens_decoder()
        already = {token.content for token in added.values() if token.special}
        backend.add_special_tokens(sorted(set(self._special_tokens.values()) - already))
        self._chat = ChatTemplates(templates, self._special_tokens)
        self._all_special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        if add_bos_token is not None or add_eos_token is not None:
            self._set_ends(add_bos_token, add_eos_token)

    @classmethod
    def from_dir(cls, path: str | Path) -> "HFTokenizer":
        """Reads tokenizer.json and, where present, the settings and chat templates beside it.

        Raises:
            ValueError: a file is missing or malformed; names it.
        """
        settings = TokenizerSettings.from_dir(path)
        file = Path(path) / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for all that is wrong with a file
            raise ValueError(f"{file} is missing or not a valid tokenizer: {error}") from error
        _add_tokens(backend, settings.added_tokens, file)
        backend.add_special_tokens(
            [token for token in settings.extra_special_tokens if backend.token_to_id(token) is not None]
        )
        return cls(
            backend,
            special_tokens=settings.special_tokens,
            templates=settings.templates,
            add_bos_token=settings.add_bos_token if settings.heeds_ends else None,
            add_eos_token=settings.add_eos_token if settings.heeds_ends else None,
        )

    def to_json(self) -> str:
        """The pipeline as the content of a tokenizer.json."""
        return self._backend.to_str(pretty=True)

    def _set_ends(self, add_bos: bool | None, add_eos: bool | None) -> None:
        """Replaces the step that adds BOS and EOS when the settings disagree with what it does."""
        ids = self._backend.encode("a").ids
        has = (bool(ids) and ids[0] == self.bos_token_id, bool(ids) and ids[-1] == self.eos_token_id)
        want = (
            self.bos_token_id is not None and (has[0] if add_bos is None else add_bos),
            self.eos_token_id is not None and (has[1] if add_eos is None else add_eos),
        )
        if want == has:
            return
        bos, eos = ([self._special_tokens[name]] if on else [] for name, on in zip(_ENDS, want, strict=True))
        self._backend.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos],
            special_tokens=[(text, self._backend.token_to_id(text)) for text in {*bos, *eos}],
        )

    def _id_of(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    @functools.cached_property
    def vocab_size(self) -> int:
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @functools.cached_property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    @functools.cached_property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    @functools.cached_property
    def pad_token_id(self) -> int | None:
        return self._id_of("pad_token")

    @property
    def all_special_ids(self) -> frozenset[int]:
        return self._all_special_ids

    @property
    def chat_template(self) -> str | None:
        return self._chat.default

    @functools.cached_property
    def pieces(self) -> BytePieces | SentencePieces | None:
        """How single tokens make up a text, where the pipeline's decoder is one we can follow token by token."""
        return _pieces(self._backend)

    @functools.cached_property
    def _splitting_backend(self) -> tokenizers.Tokenizer:
        backend = copy.deepcopy(self._backend)
        backend.encode_special_tokens = True
        return backend

    def encode(self, text: str, add_special_tokens: bool = True, *, split_special_tokens: bool = False) -> list[int]:
        """Ids of `text`. `split_special_tokens` reads special tokens in it as ordinary text (Tokenizer.encode)."""
        check_text(text)
        backend = self._splitting_backend if split_special_tokens else self._backend
        ids = backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2:
            return ids[1:]
        return ids

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of the ids (Tokenizer.decode)."""
        known = [token_id for token_id in token_ids if token_id >= 0]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token (Tokenizer.token_text)."""
        if self.pieces is not None:
            return self.pieces.text(token_id)
        return self.decode([token_id])

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: bool = True, **kwargs: Any
    ) -> list[int] | str:
        """Renders a conversation (ChatTemplates.render); BOS and EOS are in the ids where the template wrote them."""
        text = self._chat.render(messages, **kwargs)
        return self.encode(text, add_special_tokens=False) if tokenize else text


_ENDS = ("bos_token", "eos_token")


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[AddedToken], file: Path) -> None:
    """Adds those the pipeline lacks, in the order of their ids, which must come out as they are written."""
    for token in sorted(tokens, key=lambda token: token.id):
        if backend.token_to_id(token.content) is None:
            entry = tokenizers.AddedToken(
                token.content, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=token.special
            )
            backend.add_tokens([entry])
        found = backend.token_to_id(token.content)
        if found != token.id:
            raise ValueError(
                f"{file.parent / 'tokenizer_config.json'} gives {token.content!r} the id {token.id}, but in"
                f" {file.name} it is {found}; the two files do not belong together"
            )


def _pieces(backend: tokenizers.Tokenizer) -> BytePieces | SentencePieces | None:
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    if decoder["type"] == "ByteLevel":
        return BytePieces(backend.id_to_token)
    steps = decoder.get("decoders", [])
    if steps[:3] == _BYTE_FALLBACK and steps[3:] in ([], [_STRIP]):
        return SentencePieces(backend.id_to_token, strip_leading_space=bool(steps[3:]))
    return None


# The decoder that Hugging Face writes for sentencepiece models with byte fallback, with or without the last step.
_BYTE_FALLBACK = [
    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
