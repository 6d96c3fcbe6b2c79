"""Tokenizers that run a sentencepiece model: the tokenizer.model of a Hugging Face directory, or one inside a GGUF."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import sentencepiece

from jaxinfer.tokenizers.chat import ChatTemplates
from jaxinfer.tokenizers.pieces import SentencePieces
from jaxinfer.tokenizers.sentencepiece_model import without_dummy_prefix
from jaxinfer.tokenizers.settings import AddedToken, TokenizerSettings
from jaxinfer.tokenizers.text_stream import SentencePieceStream
from jaxinfer.tokenizers.tokenizer import check_text

_META_SYMBOL = "\u2581"  # stands for a space inside pieces


class SentencePieceTokenizer:
    """A sentencepiece model with added tokens, named special tokens and chat templates.

    Args:
        model: the serialised model.
        special_tokens: names such as ``bos_token`` -> text; one that is not in the vocabulary is ignored.
        added_tokens: tokens matched in the raw text, beyond the model's ids or naming some of its pieces. The
            model's control pieces are always matched.
        templates: chat templates by name.
        add_bos_token, add_eos_token: whether `encode` adds them.
        prefix_every_segment: where the model puts a space in front of a text, it does so after every added token too.

    Raises:
        ValueError: the model does not parse, or added tokens contradict it.
    """

    def __init__(
        self,
        model: bytes,
        *,
        special_tokens: Mapping[str, str] | None = None,
        added_tokens: Sequence[AddedToken] = (),
        templates: Mapping[str, str] | None = None,
        add_bos_token: bool = True,
        add_eos_token: bool = False,
        prefix_every_segment: bool = False,
    ) -> None:
        self._model = _processor(model)
        self._prefixes = self._model.normalize("a").startswith(_META_SYMBOL)
        bare = self._prefixes and not prefix_every_segment
        self._bare_model = _processor(without_dummy_prefix(model)) if bare else self._model
        self._added = {token.content: token for token in (*_control_tokens(self._model), *added_tokens)}
        self._added_text = {token.id: token.content for token in self._added.values()}
        _check_added(self._model, self._added_text)
        names = {**_own_special_tokens(self._model), **(special_tokens or {})}
        self._special_tokens = {k: v for k, v in names.items() if self._id_of_text(v) is not None}
        for text in self._special_tokens.values():
            self._make_special(text)
        self._all_special_ids = frozenset(token.id for token in self._added.values() if token.special)
        self._chat = ChatTemplates(templates or {}, self._special_tokens)
        self._add_bos = add_bos_token and self.bos_token_id is not None
        self._add_eos = add_eos_token and self.eos_token_id is not None

    @classmethod
    def from_dir(cls, path: str | Path) -> "SentencePieceTokenizer":
        """Reads tokenizer.model and, where present, the settings and chat templates beside it.

        Raises:
            ValueError: a file is missing or malformed; names it.
        """
        settings = TokenizerSettings.from_dir(path)
        file = Path(path) / "tokenizer.model"
        if not file.is_file():
            raise ValueError(f"{file} is missing; get the tokenizer's files")
        extra = set(settings.extra_special_tokens)
        added = [replace(token, special=token.special or token.content in extra) for token in settings.added_tokens]
        model = file.read_bytes()
        try:
            return cls(
                model if settings.add_prefix_space else without_dummy_prefix(model),
                special_tokens=settings.special_tokens,
                added_tokens=added,
                templates=settings.templates,
                add_bos_token=settings.add_bos_token is not False,
                add_eos_token=settings.add_eos_token is True,
                prefix_every_segment=settings.legacy,
            )
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    def _id_of_text(self, text: str) -> int | None:
        if text in self._added:
            return self._added[text].id
        token_id = self._model.piece_to_id(text)
        return token_id if self._model.id_to_piece(token_id) == text else None

    def _make_special(self, text: str) -> None:
        token_id = self._id_of_text(text)
        if token_id is not None:
            known = self._added.get(text, AddedToken(token_id, text))
            self._added[text] = replace(known, special=True)
            self._added_text[token_id] = text

    def _id_of_name(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self._id_of_text(text)

    @functools.cached_property
    def vocab_size(self) -> int:
        return max([self._model.vocab_size() - 1, *self._added_text]) + 1

    @functools.cached_property
    def bos_token_id(self) -> int | None:
        return self._id_of_name("bos_token")

    @functools.cached_property
    def eos_token_id(self) -> int | None:
        return self._id_of_name("eos_token")

    @functools.cached_property
    def pad_token_id(self) -> int | None:
        return self._id_of_name("pad_token")

    @property
    def all_special_ids(self) -> frozenset[int]:
        return self._all_special_ids

    @property
    def chat_template(self) -> str | None:
        return self._chat.default

    def _id_to_text(self, token_id: int) -> str | None:
        if token_id in self._added_text:
            return self._added_text[token_id]
        return self._model.id_to_piece(token_id) if token_id < self._model.vocab_size() else None

    @functools.cached_property
    def pieces(self) -> SentencePieces:
        """How single tokens make up a text."""
        return SentencePieces(self._id_to_text, strip_leading_space=self._prefixes)

    @functools.cached_property
    def _matchers(self) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
        """Patterns of the tokens matched in raw text: all of them, and those that are not special."""
        return _matcher(self._added.values()), _matcher([t for t in self._added.values() if not t.special])

    def encode(self, text: str, add_special_tokens: bool = True, *, split_special_tokens: bool = False) -> list[int]:
        """Ids of `text`. `split_special_tokens` reads special tokens in it as ordinary text (Tokenizer.encode)."""
        check_text(text)
        ids: list[int] = []
        model = self._model
        for part in self._split(text, self._matchers[split_special_tokens]):
            if isinstance(part, AddedToken):
                ids.append(part.id)
                model = self._bare_model
            elif part:
                ids += model.encode(part)
        if add_special_tokens:
            if self._add_bos and ids[:1] != [self.bos_token_id]:
                ids.insert(0, self.bos_token_id)  # type: ignore[arg-type]
            if self._add_eos:
                ids.append(self.eos_token_id)  # type: ignore[arg-type]
        return ids

    def _split(self, text: str, matcher: re.Pattern[str] | None) -> Iterator[str | AddedToken]:
        """The text in order: added tokens, and what is between them and is not whitespace that they take."""
        start = 0
        strip = False
        for match in matcher.finditer(text) if matcher else ():
            token = self._added[match[0]]
            between = text[start : match.start()]
            between = between.lstrip() if strip else between
            yield between.rstrip() if token.lstrip else between
            yield token
            start, strip = match.end(), token.rstrip
        yield text[start:].lstrip() if strip else text[start:]

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of the ids (Tokenizer.decode)."""
        stream = SentencePieceStream(self.pieces, self._all_special_ids if skip_special_tokens else frozenset())
        return "".join([*map(stream.push, token_ids), stream.pending()])

    def token_text(self, token_id: int) -> str:
        """Text of one token (Tokenizer.token_text)."""
        return self.pieces.text(token_id)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: bool = True, **kwargs: Any
    ) -> list[int] | str:
        """Renders a conversation (ChatTemplates.render); BOS and EOS are in the ids where the template wrote them."""
        text = self._chat.render(messages, **kwargs)
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError as error:
        raise ValueError(f"not a valid sentencepiece model: {error}") from error
    return processor


def _control_tokens(model: sentencepiece.SentencePieceProcessor) -> list[AddedToken]:
    ids = [i for i in range(model.vocab_size()) if model.is_control(i)]
    return [AddedToken(i, model.id_to_piece(i), special=True) for i in ids]


def _own_special_tokens(model: sentencepiece.SentencePieceProcessor) -> dict[str, str]:
    ids = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id()}
    return {name: model.id_to_piece(i) for name, i in ids.items() if i >= 0}


def _check_added(model: sentencepiece.SentencePieceProcessor, added: Mapping[int, str]) -> None:
    for token_id, text in added.items():
        if token_id < model.vocab_size() and model.id_to_piece(token_id) != text:
            raise ValueError(
                f"added token {text!r} has the id {token_id}, which is {model.id_to_piece(token_id)!r} in the model;"
                " tokenizer_config.json or added_tokens.json does not belong to it"
            )


def _matcher(tokens: Any) -> re.Pattern[str] | None:
    # Longest first: an alternation takes the first that matches.
    texts = sorted((token.content for token in tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None
