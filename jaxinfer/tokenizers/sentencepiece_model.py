"""Writing sentencepiece's model format (protocol buffers, sentencepiece_model.proto) without its generated classes."""

import struct
from collections.abc import Sequence

_BPE = 2  # TrainerSpec.ModelType
_BYTE = 6  # SentencePiece.Type


def _varint(value: int) -> bytes:
    if value < 0x80:  # nearly all, of hundreds of thousands
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _int_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


_TEXT = _varint(1 << 3 | 2)  # tags of a piece in the model and, alike, of the text in a piece
_SCORE = _varint(2 << 3 | 5)
_FLOAT = struct.Struct("<f")


def bpe_model(pieces: Sequence[str], scores: Sequence[float], types: Sequence[int], *, add_dummy_prefix: bool) -> bytes:
    """A BPE model that leaves text as it is but for spaces.

    Args:
        pieces, scores: one for each id; adjacent pieces with the highest score of their union merge first.
        types: SentencePiece.Type: 1 normal, 2 unknown (exactly one), 3 control, 4 user-defined, 5 unused, 6 byte.
        add_dummy_prefix: put a space in front of every text.
    """
    out = bytearray()
    kinds = {kind: _int_field(3, kind) for kind in set(types)}
    for piece, score, kind in zip(pieces, scores, types, strict=True):  # hundreds of thousands, so calls are few
        text = piece.encode()
        entry = _TEXT + _varint(len(text)) + text + _SCORE + _FLOAT.pack(score) + kinds[kind]
        out += _TEXT + _varint(len(entry)) + entry
    # Ids that are not given here come from the piece types; -1 (no padding piece) is the default.
    out += _bytes_field(2, _int_field(3, _BPE) + _int_field(35, int(_BYTE in types)))
    normalizer = _bytes_field(1, b"identity") + _int_field(3, int(add_dummy_prefix)) + _int_field(4, 0)
    out += _bytes_field(3, normalizer + _int_field(5, 1))
    return bytes(out)


def without_dummy_prefix(model: bytes) -> bytes:
    """The same model, but putting no space in front of a text: a later field overrides an earlier one."""
    return model + _bytes_field(3, _int_field(3, 0))
