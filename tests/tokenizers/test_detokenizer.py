"""Incremental text of random ids equals the libraries' decoding of all of them; stop strings; what may be streamed."""

from collections.abc import Sequence
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from jaxinfer.tokenizers.detokenizer import Detokenizer
from jaxinfer.tokenizers.hf import HFTokenizer
from jaxinfer.tokenizers.pieces import SentencePieces
from jaxinfer.tokenizers.sentencepiece import SentencePieceTokenizer
from jaxinfer.tokenizers.text_stream import SentencePieceStream
from jaxinfer.tokenizers.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
# Low ids are bytes and special tokens: mixing them in makes split and broken characters common.
IDS = st.lists(st.one_of(st.integers(0, 260), st.integers(0, 405)), max_size=30)


@pytest.fixture(scope="module")
def bpe_tokenizer(bpe: tokenizers.Tokenizer) -> HFTokenizer:
    return HFTokenizer(tokenizers.Tokenizer.from_str(bpe.to_str()), special_tokens=SPECIAL, templates={})


@pytest.fixture(scope="module")
def spm_tokenizer(spm_model: bytes) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(spm_model)


@pytest.fixture(scope="module")
def wordpiece_tokenizer(wordpiece: tokenizers.Tokenizer) -> HFTokenizer:
    backend = tokenizers.Tokenizer.from_str(wordpiece.to_str())
    return HFTokenizer(backend, special_tokens={"cls_token": "[CLS]"}, templates={})


def stream(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), **options: Any) -> Detokenizer:
    """Feeds ids until a stop string is found; checks that streamed text is never taken back."""
    detokenizer = Detokenizer(tokenizer, prompt, **options)
    sent = ""
    for token_id in ids:
        found = detokenizer.append(token_id)
        assert detokenizer.text[: detokenizer.stable_length].startswith(sent)
        sent = detokenizer.text[: detokenizer.stable_length]
        if found is not None:
            break
    detokenizer.finish()
    assert detokenizer.text.startswith(sent)
    assert detokenizer.stable_length == len(detokenizer.text)
    return detokenizer


@settings(deadline=None)
@given(ids=IDS, skip=st.booleans())
def test_byte_level_equals_full_decode(
    bpe: tokenizers.Tokenizer, bpe_tokenizer: Tokenizer, ids: Any, skip: bool
) -> None:
    assert stream(bpe_tokenizer, ids, skip_special_tokens=skip).text == bpe.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(ids=IDS, skip=st.booleans())
def test_sentencepiece_equals_the_hugging_face_decoder(
    spm: sentencepiece.SentencePieceProcessor, spm_tokenizer: SentencePieceTokenizer, ids: Any, skip: bool
) -> None:
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", left=1)]
    )
    known = [i for i in ids if i < spm.vocab_size() and not (skip and i < 3)]
    expected = decoder.decode([spm.id_to_piece(i) for i in known])
    assert stream(spm_tokenizer, ids, skip_special_tokens=skip).text == expected
    assert spm_tokenizer.decode(ids, skip_special_tokens=skip) == expected


@settings(deadline=None)
@given(ids=IDS, skip=st.booleans())
def test_other_decoders_equal_full_decode(
    wordpiece: tokenizers.Tokenizer, wordpiece_tokenizer: HFTokenizer, ids: Any, skip: bool
) -> None:
    assert wordpiece_tokenizer.pieces is None
    expected = wordpiece.decode(ids, skip_special_tokens=skip)
    assert stream(wordpiece_tokenizer, ids, skip_special_tokens=skip).text == expected


@settings(deadline=None)
@given(
    prompt=st.text("the fox 你好😀é", max_size=8), text=st.text("the fox 你好😀é", max_size=12), cut=st.integers(0, 12)
)
def test_text_continues_the_prompt(bpe_tokenizer: HFTokenizer, prompt: str, text: str, cut: int) -> None:
    """Wherever the ids are cut, also inside a character, prompt and output text together are the whole text."""
    ids = bpe_tokenizer.encode(prompt + text)
    head, tail = ids[:cut], ids[cut:]
    settled = bpe_tokenizer.decode(head).rstrip("\ufffd")
    assert settled + stream(bpe_tokenizer, tail, head).text == prompt + text


def test_leading_space_depends_on_the_prompt(
    spm: sentencepiece.SentencePieceProcessor, spm_tokenizer: SentencePieceTokenizer
) -> None:
    hello = spm.encode("hello")
    assert stream(spm_tokenizer, hello).text == "hello"
    assert stream(spm_tokenizer, hello, prompt=[1]).text == "hello"  # BOS is skipped and so no text
    assert stream(spm_tokenizer, hello, prompt=[1, *spm.encode("the")]).text == " hello"


def test_character_in_parts_is_held_back(bpe_tokenizer: HFTokenizer, spm_tokenizer: SentencePieceTokenizer) -> None:
    detokenizer = Detokenizer(bpe_tokenizer, [])
    for i, token_id in enumerate(byte_ids(bpe_tokenizer, "😀")):
        assert (detokenizer.text, detokenizer.stable_length) == ("\ufffd" if i else "", 0)
        detokenizer.append(token_id)
    assert (detokenizer.text, detokenizer.stable_length) == ("😀", 1)
    # A run of sentencepiece's byte tokens can still be spoilt by its next byte, so it waits for another token.
    detokenizer = Detokenizer(spm_tokenizer, [])
    for byte in "é".encode():
        detokenizer.append(3 + byte)
    assert (detokenizer.text, detokenizer.stable_length) == ("é", 0)
    detokenizer.finish()
    assert (detokenizer.text, detokenizer.stable_length) == ("é", 1)


def byte_ids(tokenizer: HFTokenizer, text: str) -> list[int]:
    """Ids of the single bytes of a text."""
    single = {tokenizer.pieces[i]: i for i in range(4, 260)}  # type: ignore[index]
    return [single.get(bytes([b]), single.get(chr(b), -1)) for b in text.encode()]


@pytest.mark.parametrize(
    ("text", "stop", "include", "expected"),
    [
        ("abcdef", ["cd"], False, ("ab", "cd")),
        ("abcdef", ["cd"], True, ("abcd", "cd")),
        ("abcdef", ["ef", "bc"], False, ("a", "bc")),  # the first in the text, not in the list
        ("abcdef", ["c", "bc"], False, ("a", "bc")),  # both complete at once: the longer
        ("aabaabaac", ["aabaac"], False, ("aab", "aabaac")),
        ("abx", ["xyz"], False, ("abx", None)),  # what was held back is released at the end
        ("a😀b", ["😀"], False, ("a", "😀")),
        ("a😁b", ["😀"], False, ("a😁b", None)),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_stop_strings(
    bpe_tokenizer: HFTokenizer, text: str, stop: list[str], include: bool, expected: tuple[str, str | None], whole: bool
) -> None:
    ids = bpe_tokenizer.encode(text) if whole else byte_ids(bpe_tokenizer, text)
    detokenizer = Detokenizer(bpe_tokenizer, [], stop=stop, include_stop_str_in_output=include)
    found = next((s for s in map(detokenizer.append, ids) if s is not None), None)
    detokenizer.finish()
    assert (detokenizer.text, found) == expected


def test_possible_start_of_a_stop_string_is_not_streamed(bpe_tokenizer: HFTokenizer) -> None:
    detokenizer = Detokenizer(bpe_tokenizer, [], stop=["lo w"])
    stable = []
    for token_id in byte_ids(bpe_tokenizer, "hello lo x"):
        detokenizer.append(token_id)
        stable.append(detokenizer.stable_length)
    assert stable == [1, 2, 2, 3, 3, 3, 6, 6, 6, 10]


@settings(deadline=None)
@given(
    text=st.text("abc", max_size=20),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_stop_strings_equal_a_search_after_each_letter(
    bpe_tokenizer: HFTokenizer, text: str, stop: list[str], include: bool
) -> None:
    """Reference: after each letter, does the whole text end with a stop string?"""
    expected = text
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            expected = text[:end] if include else text[: end - max(map(len, complete))]
            break
    result = stream(bpe_tokenizer, byte_ids(bpe_tokenizer, text), stop=stop, include_stop_str_in_output=include)
    assert result.text == expected


def test_stop_in_the_prompt_or_across_its_border_is_ignored(bpe_tokenizer: HFTokenizer) -> None:
    prompt, output = byte_ids(bpe_tokenizer, "xstopy st"), byte_ids(bpe_tokenizer, "op z")
    assert stream(bpe_tokenizer, output, prompt, stop=["stop"]).text == "op z"


def test_stop_completed_by_an_early_token_is_text(bpe_tokenizer: HFTokenizer) -> None:
    ids = byte_ids(bpe_tokenizer, "abxxxxxab")
    for min_tokens, text in [(0, ""), (1, ""), (2, "abxxxxx"), (5, "abxxxxx"), (9, "abxxxxxab")]:
        assert stream(bpe_tokenizer, ids, stop=["ab"], min_tokens=min_tokens).text == text


def test_early_stop_stays_text_beside_a_longer_stop(bpe_tokenizer: HFTokenizer) -> None:
    ids = byte_ids(bpe_tokenizer, "abxxab")
    assert stream(bpe_tokenizer, ids, stop=["ab", "zzzzzz"], min_tokens=2).text == "abxx"


def test_stop_in_byte_fallback_is_found_at_once(spm_tokenizer: SentencePieceTokenizer) -> None:
    detokenizer = Detokenizer(spm_tokenizer, [], stop=["😁"])
    found = [detokenizer.append(3 + byte) for byte in "é😁".encode()]
    assert found == [None] * 5 + ["😁"]
    assert detokenizer.text == "é"


def test_nothing_follows_a_stop(bpe_tokenizer: HFTokenizer) -> None:
    detokenizer = stream(bpe_tokenizer, byte_ids(bpe_tokenizer, "ab"), stop=["b"])
    with pytest.raises(RuntimeError, match="ended"):
        detokenizer.append(5)
    detokenizer.finish()
    assert detokenizer.text == "a"


def test_empty_stop_string_is_refused(bpe_tokenizer: HFTokenizer) -> None:
    with pytest.raises(ValueError, match="empty string"):
        Detokenizer(bpe_tokenizer, [], stop=["a", ""])


class Own:
    """A tokenizer of a user's, with no more than the protocol asks for."""

    all_special_ids = frozenset({1})

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=False)


def test_a_tokenizer_of_the_users_own(wordpiece: tokenizers.Tokenizer) -> None:
    own: Any = Own(wordpiece)
    ids = wordpiece.encode("the quick brown fox said hello").ids
    assert stream(own, ids).text == "the quick brown fox said hello"
    prompt = wordpiece.encode("the quick").ids
    assert stream(own, ids[len(prompt) :], prompt).text == " brown fox said hello"


@settings(deadline=None)
@given(text=st.text("the fox 你好😀é", max_size=12))
def test_a_tokenizer_of_the_users_own_with_split_characters(
    bpe: tokenizers.Tokenizer, bpe_tokenizer: HFTokenizer, text: str
) -> None:
    own: Any = Own(bpe)
    assert stream(own, byte_ids(bpe_tokenizer, text)).text == text


def test_prompt_ends_with_three_quarters_of_a_character(bpe_tokenizer: HFTokenizer) -> None:
    *head, last = byte_ids(bpe_tokenizer, "x😀")
    assert stream(bpe_tokenizer, [last], head).text == "😀"


def test_added_token_outside_the_byte_alphabet_stands_for_itself(bpe: tokenizers.Tokenizer) -> None:
    backend = tokenizers.Tokenizer.from_str(bpe.to_str())
    backend.add_tokens(["é x", "é"])
    tokenizer = HFTokenizer(backend, special_tokens={}, templates={})
    plain, alphabet = backend.token_to_id("é x"), backend.token_to_id("é")
    assert stream(tokenizer, [plain, alphabet]).text == backend.decode([plain, alphabet]) == "é x\ufffd"


def test_empty_piece_does_not_use_up_the_leading_space() -> None:
    pieces = SentencePieces(["", "▁a"].__getitem__, strip_leading_space=True)
    text = SentencePieceStream(pieces, frozenset())
    assert [text.push(0), text.push(1), text.push(1)] == ["", "a", " a"]
