"""The built-in calibration text and how a text is cut."""

from pathlib import Path
from typing import Any

import pytest

from jaxinfer.calibration.text import calibration_samples, calibration_text


class Letters:
    """A tokenizer with a token a letter, 1 to 26, and BOS 0 before a text where asked for."""

    bos_token_id = 0

    def __init__(self, begins: bool) -> None:
        self.begins = begins

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * (self.begins and add_special_tokens) + [ord(letter) - 96 for letter in text]


def test_the_built_in_text_is_long_and_not_the_one_that_is_evaluated() -> None:
    text = calibration_text()
    assert 100_000 < len(text.encode()) < 200_000
    assert "Alice" in text
    assert "Hamlet" not in text and "Gutenberg" not in text


def test_a_file_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Größe", encoding="utf-8")
    assert calibration_text(tmp_path / "text") == "Größe"
    (tmp_path / "latin").write_bytes("Größe".encode("latin-1"))
    with pytest.raises(ValueError, match="latin is not UTF-8"):
        calibration_text(tmp_path / "latin")


def test_pieces_begin_at_equal_distances_and_reach_the_end() -> None:
    tokenizer: Any = Letters(begins=False)
    assert calibration_samples(tokenizer, "abcdefgh", 3, 4).tolist() == [[1, 2, 3, 4], [3, 4, 5, 6], [5, 6, 7, 8]]
    assert calibration_samples(tokenizer, "abcd", 1, 4).tolist() == [[1, 2, 3, 4]]


def test_every_piece_begins_as_a_text_does() -> None:
    tokenizer: Any = Letters(begins=True)
    assert calibration_samples(tokenizer, "abcd", 2, 3).tolist() == [[0, 1, 2], [0, 3, 4]]


@pytest.mark.parametrize(
    ("samples", "seq_len", "message"),
    [(0, 4, "samples=0"), (1, 1, "seq_len=1"), (1, 5, "has 4 tokens, fewer than seq_len=5")],
)
def test_what_cannot_be_cut_is_refused(samples: int, seq_len: int, message: str) -> None:
    tokenizer: Any = Letters(begins=False)
    with pytest.raises(ValueError, match=message):
        calibration_samples(tokenizer, "abcd", samples, seq_len)


def test_a_text_that_is_not_there_is_named_with_what_else_to_give(tmp_path: Path) -> None:
    for missing in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(ValueError, match=f"calibration='{missing}' is no file; .* or 'builtin'"):
            calibration_text(missing)
