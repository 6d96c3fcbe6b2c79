"""What single tokens contribute to a text: bytes for byte-level vocabularies, strings or bytes for sentencepiece."""

import codecs
import contextlib
import re
from collections.abc import Callable
from typing import Protocol, runtime_checkable


def byte_level_alphabet() -> dict[int, int]:
    """The GPT-2 byte alphabet, inverted: code point of a vocabulary character -> the byte it stands for.

    Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 and up in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: byte for byte in printable} | {0x100 + i: byte for i, byte in enumerate(others)}


class BytePieces(dict[int, str | bytes]):
    """Token id -> its share of a text in a byte-level vocabulary, worked out when first asked for.

    A value is a str when the token is made of whole UTF-8 characters, bytes when it holds part of one, and "" for an
    id that is not in the vocabulary.
    """

    def __init__(self, id_to_token: Callable[[int], str | None]) -> None:
        super().__init__()
        self._id_to_token = id_to_token
        alphabet = byte_level_alphabet()
        self._to_latin1 = {code: chr(byte) for code, byte in alphabet.items()}
        self._foreign = re.compile("[^" + "".join(re.escape(chr(code)) for code in alphabet) + "]")

    def __missing__(self, token_id: int) -> str | bytes:
        token = self._id_to_token(token_id) if token_id >= 0 else None
        piece: str | bytes = b""
        if token is not None:
            # A token with a character outside the alphabet was added as plain text and stands for itself.
            plain = self._foreign.search(token) is not None
            piece = token.encode() if plain else token.translate(self._to_latin1).encode("latin-1")
        with contextlib.suppress(UnicodeDecodeError):
            piece = piece.decode() if isinstance(piece, bytes) else piece
        self[token_id] = piece
        return piece

    def text(self, token_id: int) -> str:
        """Text of the token alone."""
        piece = self[token_id]
        return piece if isinstance(piece, str) else piece.decode(errors="replace")


class SentencePieces(dict[int, str | int | None]):
    """Token id -> its share of a text in a sentencepiece vocabulary, worked out when first asked for.

    A value is a str (with spaces for the meta symbol U+2581), an int for a byte-fallback token ``<0xNN>``, or None for
    an id that is not in the vocabulary.

    Attributes:
        strip_leading_space: the encoder puts a space before a text, so decoding takes one away.
    """

    def __init__(self, id_to_token: Callable[[int], str | None], *, strip_leading_space: bool) -> None:
        super().__init__()
        self._id_to_token = id_to_token
        self.strip_leading_space = strip_leading_space

    def __missing__(self, token_id: int) -> str | int | None:
        token = self._id_to_token(token_id) if token_id >= 0 else None
        piece: str | int | None = token
        if token is not None:
            byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
            piece = int(byte[1], 16) if byte else token.replace("\u2581", " ")
        self[token_id] = piece
        return piece

    def text(self, token_id: int) -> str:
        """Text of the token alone, its leading space kept."""
        piece = self[token_id]
        if isinstance(piece, int):
            return chr(piece) if piece < 0x80 else "\ufffd"
        return piece or ""


@runtime_checkable
class HasPieces(Protocol):
    """A tokenizer whose text is put together token by token; None where its decoder is of another kind."""

    @property
    def pieces(self) -> BytePieces | SentencePieces | None: ...


def whole_utf8(data: bytes) -> tuple[str, bytes]:
    """Splits bytes into the text of all whole (or hopeless: U+FFFD) characters and the start of an unfinished one."""
    text, used = codecs.utf_8_decode(data, "replace", False)
    return text, data[used:]
