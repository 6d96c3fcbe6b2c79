"""tokenizer.json directories against the `tokenizers` library, and what the files beside it change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, processors

from jaxinfer.tokenizers.hf import HFTokenizer
from jaxinfer.tokenizers.load import load_tokenizer
from jaxinfer.tokenizers.pieces import SentencePieces
from jaxinfer.tokenizers.text_stream import open_stream

CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None, "add_bos_token": True}
ModelDir = Callable[..., Path]


def test_ids_and_text_equal_the_library(bpe: tokenizers.Tokenizer, model_dir: ModelDir) -> None:
    tokenizer = load_tokenizer(model_dir(bpe))
    assert isinstance(tokenizer, HFTokenizer)
    for text in ["", "hello world", "<s>hi</s>", "naïve 你好 😀", " x\n\n  y"]:
        ids = bpe.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == bpe.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode([0, *bpe.encode("hi").ids, 1], skip_special_tokens=True) == "hi"
    assert tokenizer.vocab_size == bpe.get_vocab_size()
    assert tokenizer.chat_template is None


def test_unknown_ids_and_broken_characters_decode(bpe: tokenizers.Tokenizer, model_dir: ModelDir) -> None:
    tokenizer = HFTokenizer.from_dir(model_dir(bpe))
    broken = tokenizer.encode("日")[:1]
    assert tokenizer.decode([-1, *broken, 10**6]) == "\ufffd"
    assert tokenizer.token_text(broken[0]) == "\ufffd"
    assert tokenizer.token_text(10**6) == tokenizer.token_text(-1) == ""


def test_half_a_surrogate_pair_is_refused(bpe: tokenizers.Tokenizer, model_dir: ModelDir) -> None:
    with pytest.raises(ValueError, match=r"holds '\\ud83d' at character 3, half of a surrogate pair.*leave it out"):
        HFTokenizer.from_dir(model_dir(bpe)).encode("hi \ud83d")


def test_special_tokens_and_bos_from_the_config(bpe: tokenizers.Tokenizer, model_dir: ModelDir) -> None:
    tokenizer = HFTokenizer.from_dir(
        model_dir(bpe, tokenizer_config=CONFIG, special_tokens_map={"pad_token": "<pad>", "bos_token": "</s>"})
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    plain = bpe.encode("hello").ids
    assert tokenizer.encode("hello") == [0, *plain]
    assert tokenizer.encode("hello", add_special_tokens=False) == plain
    assert tokenizer.encode("<s>hello") == [0, *plain]  # exactly one
    assert tokenizer.encode("") == [0]


@pytest.mark.parametrize(
    ("config", "first", "last"),
    [
        ({}, 0, None),
        ({"add_bos_token": False}, None, None),
        ({"add_bos_token": True}, 0, None),
        ({"add_eos_token": True}, 0, 1),
        ({"add_bos_token": False, "add_eos_token": True}, None, 1),
        ({"add_bos_token": False, "tokenizer_class": "GemmaTokenizerFast"}, None, None),
        ({"add_bos_token": False, "add_eos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"}, 0, None),
    ],
)
def test_config_overrides_the_pipeline(
    bpe: tokenizers.Tokenizer, model_dir: ModelDir, config: dict[str, Any], first: int | None, last: int | None
) -> None:
    backend = tokenizers.Tokenizer.from_str(bpe.to_str())
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = HFTokenizer.from_dir(model_dir(backend, tokenizer_config=names | config))
    plain = bpe.encode("hello").ids
    assert tokenizer.encode("hello") == [i for i in (first, *plain, last) if i is not None]


def test_truncation_and_padding_of_the_file_are_off(bpe: tokenizers.Tokenizer, model_dir: ModelDir) -> None:
    backend = tokenizers.Tokenizer.from_str(bpe.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=512)
    text = "hello world " * 20
    assert HFTokenizer.from_dir(model_dir(backend)).encode(text) == bpe.encode(text).ids


def test_added_tokens_of_the_config(bpe: tokenizers.Tokenizer, model_dir: ModelDir) -> None:
    new = bpe.get_vocab_size()
    added = {"0": {"content": "<s>", "special": True}, str(new): {"content": "<|think|>", "special": True}}
    tokenizer = HFTokenizer.from_dir(model_dir(bpe, tokenizer_config={"added_tokens_decoder": added}))
    assert tokenizer.encode("<|think|>hello") == [new, *bpe.encode("hello").ids]
    assert tokenizer.vocab_size == new + 1
    assert new in tokenizer.all_special_ids
    assert len(tokenizer.encode("<|think|>", split_special_tokens=True)) > 1


def test_added_token_with_another_id_is_refused(bpe: tokenizers.Tokenizer, model_dir: ModelDir) -> None:
    path = model_dir(bpe, tokenizer_config={"added_tokens_decoder": {"7": {"content": "<s>"}}})
    with pytest.raises(ValueError, match="'<s>' the id 7, but in tokenizer.json it is 0"):
        HFTokenizer.from_dir(path)


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"x": {"content": "<s>"}}},
        {"added_tokens_decoder": {"5": {}}},
        {"added_tokens_decoder": {"5": None}},
        {"added_tokens_decoder": {"5": {"content": 5}}},
        {"added_tokens_decoder": {"-1": {"content": "<x>"}}},
        {"added_tokens_decoder": {"5": {"content": ""}}},
        {"chat_template": [{"name": "default"}]},
        {"chat_template": {"default": 1}},
    ],
)
def test_malformed_settings_name_the_file(bpe: tokenizers.Tokenizer, model_dir: ModelDir, config: Any) -> None:
    with pytest.raises(ValueError, match=r"tokenizer_config\.json or a file beside it has malformed"):
        HFTokenizer.from_dir(model_dir(bpe, tokenizer_config=config))


def test_named_token_outside_the_vocabulary_gets_no_id(bpe: tokenizers.Tokenizer, model_dir: ModelDir) -> None:
    tokenizer = HFTokenizer.from_dir(model_dir(bpe, tokenizer_config={"pad_token": "[PAD]", "bos_token": "[B]"}))
    assert tokenizer.pad_token_id is None and tokenizer.bos_token_id is None
    assert tokenizer.vocab_size == bpe.get_vocab_size()


def test_byte_fallback_pipeline_is_followed_token_by_token(bpe: tokenizers.Tokenizer) -> None:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "b": 257, "▁": 258}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", left=1)]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = HFTokenizer(backend, special_tokens={}, templates={})
    assert isinstance(tokenizer.pieces, SentencePieces)
    for ids in ([256, 257], [0xC3, 0xA9, 256], [257, 0xC3, 257], [258, 258, 0x20, 0xC3, 0xA9, 0xFF], [0x20, 0x20]):
        stream = open_stream(tokenizer, [], skip_special_tokens=False)
        assert "".join(map(stream.push, ids)) + stream.pending() == backend.decode(ids)
    for other in (steps[:2], [*steps[:3], decoders.Strip(" ", left=2)]):  # not those we know: the library decodes
        backend.decoder = decoders.Sequence(other)
        assert HFTokenizer(backend, special_tokens={}, templates={}).pieces is None


def test_templates_come_from_all_their_places(bpe: tokenizers.Tokenizer, model_dir: ModelDir) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    path = model_dir(bpe, tokenizer_config={"chat_template": named})
    messages = [{"role": "user", "content": "x"}]
    tokenizer = HFTokenizer.from_dir(path)
    assert tokenizer.chat_template == "D"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "D"
    assert tokenizer.apply_chat_template(messages, tokenize=False, tools=[{"type": "function"}]) == "T"
    assert tokenizer.apply_chat_template(messages, tokenize=False, chat_template="tool_use") == "T"
    assert tokenizer.apply_chat_template(messages, tokenize=False, chat_template="{{ 1 + 1 }}") == "2"
    model_dir(bpe, chat_template="F")
    assert HFTokenizer.from_dir(path).chat_template == "F"


def test_chat_ids_have_one_bos(bpe: tokenizers.Tokenizer, model_dir: ModelDir) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer = HFTokenizer.from_dir(model_dir(bpe, tokenizer_config=CONFIG, chat_template=template))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert ids == [0, *bpe.encode("hello").ids, 1]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert tokenizer.encode(str(text)) == ids


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_file_is_named(bpe: tokenizers.Tokenizer, model_dir: ModelDir, name: str) -> None:
    path = model_dir(bpe, tokenizer_config=CONFIG)
    (path / name).write_text((path / name).read_text(encoding="utf-8")[:-9], encoding="utf-8")
    with pytest.raises(ValueError, match=name):
        load_tokenizer(path)


def test_missing_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither tokenizer.json nor tokenizer.model"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="must be a directory"):
        load_tokenizer(tmp_path / "nothing")
    (tmp_path / "tekken.json").touch()
    with pytest.raises(ValueError, match=r"\(tekken.json, which it has, cannot be read alone\); add one"):
        load_tokenizer(tmp_path)


def test_text_must_be_a_string(bpe: tokenizers.Tokenizer, model_dir: ModelDir) -> None:
    with pytest.raises(TypeError, match="text must be a str, not list"):
        HFTokenizer.from_dir(model_dir(bpe)).encode(["a"])  # type: ignore[arg-type]
