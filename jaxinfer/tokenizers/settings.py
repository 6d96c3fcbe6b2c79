"""The small files beside a Hugging Face tokenizer: tokenizer_config.json, special_tokens_map.json, chat templates."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Hugging Face's classes that put BOS and EOS where these settings say; the others leave it to tokenizer.json.
_CLASSES_WITH_ENDS = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer", "GPTNeoXTokenizer")
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class AddedToken:
    """A token added to a trained vocabulary: matched in the raw text before anything else.

    Attributes:
        special: left out of decoded text under `skip_special_tokens`.
        lstrip, rstrip: it takes the whitespace before, or after it with it.
    """

    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True)
class TokenizerSettings:
    """What the files say.

    Attributes:
        special_tokens: ``bos_token`` and the like -> text.
        extra_special_tokens: texts of further special tokens.
        added_tokens: tokens with explicit ids.
        templates: chat templates by name, the main one as "default".
        add_bos_token, add_eos_token: whether encoding adds them; None where the files do not say.
        heeds_ends: a tokenizer.json gives way to those two.
        legacy: sentencepiece only: put a space in front of every stretch of text between special tokens, not only
            in front of the whole text. A config that does not say is older than the question, and so True.
        add_prefix_space: sentencepiece only: False puts no space in front of a text although the model would.
    """

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    extra_special_tokens: tuple[str, ...] = ()
    added_tokens: tuple[AddedToken, ...] = ()
    templates: Mapping[str, str] = field(default_factory=dict)
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    heeds_ends: bool = True
    legacy: bool = True
    add_prefix_space: bool = True

    @classmethod
    def from_dir(cls, path: str | Path) -> "TokenizerSettings":
        """Reads a directory; every file is optional, tokenizer_config.json wins where two say different things.

        Raises:
            ValueError: a file is malformed; names it.
        """
        path = Path(path)
        config = _read(path / "tokenizer_config.json")
        kind = str(config.get("tokenizer_class") or _CLASSES_WITH_ENDS[0]).removesuffix("Fast")
        named = {**_read(path / "special_tokens_map.json"), **{k: v for k, v in config.items() if v is not None}}
        special = {name: text for name in _NAMES if (text := _text(named.get(name))) is not None}
        extra = [*_as_list(named.get("additional_special_tokens")), *_as_list(named.get("extra_special_tokens"))]
        try:
            added_tokens, templates = _added_tokens(path, config), _templates(path, config)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path / 'tokenizer_config.json'} or a file beside it has malformed added tokens or chat templates "
                f"({error!r}); get it again"
            ) from error
        return cls(
            special_tokens=special,
            extra_special_tokens=tuple(text for token in extra if (text := _text(token)) is not None),
            added_tokens=added_tokens,
            templates=templates,
            add_bos_token=config.get("add_bos_token"),
            add_eos_token=config.get("add_eos_token"),
            heeds_ends=kind in _CLASSES_WITH_ENDS,
            legacy=config.get("legacy") is not False,
            add_prefix_space=config.get("add_prefix_space") is not False,
        )


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON: {error}; get the file again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, not {type(content).__name__}")
    return content


def _as_list(value: Any) -> list[Any]:
    """The values of a list or, as newer files write it, of a mapping from name to token."""
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _text(token: Any) -> str | None:
    """Text of a token given as a string or as an object with `content`."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _added_tokens(path: Path, config: Mapping[str, Any]) -> tuple[AddedToken, ...]:
    by_content: dict[str, AddedToken] = {}
    for content, token_id in _read(path / "added_tokens.json").items():
        by_content[content] = AddedToken(int(token_id), content)
    for token_id, entry in (config.get("added_tokens_decoder") or {}).items():
        flags = {name: bool(entry.get(name, False)) for name in ("special", "lstrip", "rstrip")}
        by_content[entry["content"]] = AddedToken(int(token_id), entry["content"], **flags)
    for token in by_content.values():
        if not isinstance(token.content, str) or not token.content or token.id < 0:
            raise ValueError(f"an added token {token.content!r} of id {token.id}")
    return tuple(by_content.values())


def _templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates in files of their own win over those inside tokenizer_config.json."""
    found = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(found, str):
        templates["default"] = found
    elif isinstance(found, list):
        templates |= {entry["name"]: entry["template"] for entry in found}
    elif isinstance(found, dict):
        templates |= found
    alone = _read(path / "chat_template.json").get("chat_template")
    if isinstance(alone, str):
        templates["default"] = alone
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    if (path / "chat_template.jinja").is_file():
        templates["default"] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    if not all(isinstance(text, str) for text in (*templates, *templates.values())):
        raise ValueError("a chat template that is no text")
    return templates
