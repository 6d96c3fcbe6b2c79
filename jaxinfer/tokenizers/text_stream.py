"""Decoding token by token: each stream yields text that no later token can change, and holds back the rest."""

from collections.abc import Sequence
from typing import Protocol

from jaxinfer.tokenizers.pieces import BytePieces, HasPieces, SentencePieces, whole_utf8
from jaxinfer.tokenizers.tokenizer import Tokenizer


class TextStream(Protocol):
    """The text of a growing id sequence. `push`ed text plus `pending()` is the decoding of all ids so far."""

    def push(self, token_id: int) -> str:
        """Takes one more token and returns the text that became final by it."""
        ...

    def pending(self) -> str:
        """Text of what is held back, as it would read if the sequence ended here."""
        ...

    def whole_pending(self) -> str:
        """`pending()` when it consists of whole characters, so that a stop string may be looked for in it, else ""."""
        ...


def open_stream(tokenizer: Tokenizer, context: Sequence[int], *, skip_special_tokens: bool) -> TextStream:
    """A stream for the ids that follow `context`.

    The context decides whether the first token keeps its leading space, and bytes at its end that start a character
    are completed by the tokens that follow.
    """
    skipped = frozenset(tokenizer.all_special_ids) if skip_special_tokens else frozenset()
    pieces = tokenizer.pieces if isinstance(tokenizer, HasPieces) else None
    if isinstance(pieces, BytePieces):
        return ByteStream(pieces, skipped, context)
    if isinstance(pieces, SentencePieces):
        return SentencePieceStream(pieces, skipped, context)
    return WindowStream(tokenizer, skipped, context)


class ByteStream:
    """Byte-level BPE: the tokens' bytes joined and read as UTF-8, maximal invalid parts as U+FFFD."""

    def __init__(self, pieces: BytePieces, skipped: frozenset[int], context: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._skipped = skipped
        tail = b""
        for token_id in reversed(context):
            if len(tail) >= 3:  # an unfinished character has at most three bytes
                break
            piece = b"" if token_id in skipped else pieces[token_id]
            tail = (piece.encode() if isinstance(piece, str) else piece) + tail
        self._unfinished = whole_utf8(tail)[1]

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            if not self._unfinished:
                return piece
            piece = piece.encode()
        text, self._unfinished = whole_utf8(self._unfinished + piece)
        return text

    def pending(self) -> str:
        return self._unfinished.decode(errors="replace")

    def whole_pending(self) -> str:
        return ""


class SentencePieceStream:
    """Sentencepiece with byte fallback, read as Hugging Face's ByteFallback decoder reads it.

    A run of byte tokens is text when all of it is UTF-8, otherwise one U+FFFD a byte; so a run is final only when
    another token follows.
    """

    def __init__(self, pieces: SentencePieces, skipped: frozenset[int], context: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._skipped = skipped
        self._run = bytearray()
        self._at_start = pieces.strip_leading_space
        self._read_context(context)

    def _read_context(self, context: Sequence[int]) -> None:
        run: list[int] = []
        for token_id in reversed(context):
            piece = None if token_id in self._skipped else self._pieces[token_id]
            if piece is None:
                continue
            self._at_start = False
            if isinstance(piece, str):
                break
            run.append(piece)
        self._run += whole_utf8(bytes(reversed(run)))[1]

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._pieces[token_id]
        if piece is None:
            return ""
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        if self._run:
            piece = self._run_text() + piece
            self._run.clear()
        if self._at_start and piece:
            self._at_start = False
            piece = piece.removeprefix(" ")
        return piece

    def _run_text(self) -> str:
        try:
            return self._run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(self._run)

    def pending(self) -> str:
        text = self._run_text()
        return text.removeprefix(" ") if self._at_start else text

    def whole_pending(self) -> str:
        text = self.pending()
        return "" if text.endswith("\ufffd") else text


class WindowStream:
    """Any other decoder: decodes the last few tokens again, with and without the new one, and takes the difference.

    The window begins one settled group of tokens back, which is as far as the spacing rules of WordPiece, Metaspace
    and the like look.
    """

    _CONTEXT_TOKENS = 6
    _LONGEST_UNFINISHED = 8  # tokens; a character is at most four bytes, what is longer is no unfinished character

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._ids = [i for i in context[-4 * self._CONTEXT_TOKENS :] if i not in skipped][-self._CONTEXT_TOKENS :]
        self._num_settled = len(self._ids)
        self._settled_text = self._decode(self._ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids) if ids else ""

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        unfinished = len(self._ids) - self._num_settled
        if unfinished < self._LONGEST_UNFINISHED and (text.endswith("\ufffd") or text == self._settled_text):
            return ""
        new = text[len(self._settled_text) :]
        del self._ids[: self._num_settled]
        self._num_settled = len(self._ids)
        self._settled_text = self._decode(self._ids)
        return new

    def pending(self) -> str:
        return self._decode(self._ids)[len(self._settled_text) :]

    def whole_pending(self) -> str:
        return ""
