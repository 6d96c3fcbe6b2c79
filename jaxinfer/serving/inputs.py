"""What callers give: prompts as text or token ids, and conversations, turned into token ids."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NotRequired, TypeAlias, TypedDict

import numpy as np

from jaxinfer.tokenizers.messages import is_message
from jaxinfer.tokenizers.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    """A prompt as text; for `cache_salt` see `TokenizedPrompt`."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is its text when it is known, and is only handed through."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
Message: TypeAlias = Mapping[str, Any]
"""One message of a conversation, as in the OpenAI API: "role", "content", maybe "tool_calls" and the like."""


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt as the engine takes it.

    Attributes:
        token_ids: the ids; their range is checked by the engine.
        text: the prompt's text, None when only ids were given.
        cache_salt: prompts share what the prefix cache holds with prompts of the same salt only, so that nobody can
            tell by the time an answer takes what others have asked; None shares with all that have none.
    """

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several -> several. A non-empty sequence of ints is one prompt of token ids.

    Raises:
        TypeError: neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    prompts = _listed(prompts)
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise TypeError(f"prompts={prompts!r} must be a str, a list of token ids, a mapping, or a list of those")
    if prompts and all(isinstance(item, numbers.Integral) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def tokenize_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> TokenizedPrompt:
    """Turns one prompt into token ids; text gets the special tokens its tokenizer adds (a BOS, say).

    Raises:
        TypeError: not a prompt.
        ValueError: text without a tokenizer, or a mapping with entries that are not supported.
    """
    if isinstance(prompt, str):
        return TokenizedPrompt(require_tokenizer(tokenizer, "a text prompt").encode(prompt), prompt)
    if not isinstance(prompt, Mapping):
        return TokenizedPrompt(_token_ids(prompt))
    for name, value in prompt.items():
        if name not in ("prompt", "prompt_token_ids", "cache_salt") and value is not None:
            raise ValueError(
                f"a prompt holds {name}={value!r}, which is not supported; give prompt or prompt_token_ids"
            )
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"prompt={text!r} must be a str; give token ids as prompt_token_ids")
    if ids is None and text is None:
        raise TypeError(f"the prompt {dict(prompt)!r} has neither prompt nor prompt_token_ids")
    tokenized = TokenizedPrompt(_token_ids(ids), text) if ids is not None else tokenize_prompt(text or "", tokenizer)
    return replace(tokenized, cache_salt=prompt.get("cache_salt"))


def conversation_list(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation or several -> several.

    Raises:
        TypeError: neither.
        ValueError: no messages at all.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"messages={messages!r} must be a list of messages, or a list of such lists")
    if not messages:
        raise ValueError("messages=[] holds no message; give at least one")
    if all(is_message(item) for item in messages):
        return [messages]  # type: ignore[list-item]
    for item in messages:
        if isinstance(item, str) or is_message(item) or not isinstance(item, Sequence):
            raise TypeError(f"messages holds {item!r}; give one list of messages, or a list of such lists")
    return list(messages)  # type: ignore[arg-type]


def render_chat(messages: Sequence[Message], tokenizer: Tokenizer | None, /, **options: Any) -> TokenizedPrompt:
    """A conversation as a prompt, through the tokenizer's chat template.

    Args:
        options: of `Tokenizer.apply_chat_template`.

    Raises:
        ValueError: no tokenizer, no template, or the template refuses the messages (with its own message).
    """
    tokenizer = require_tokenizer(tokenizer, "chat()")
    for name in ("messages", "tokenize"):
        if name in options:
            raise ValueError(f"chat_template_kwargs holds {name!r}, which is no variable of templates; leave it out")
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert isinstance(text, str)
    # The template writes every special token itself.
    return TokenizedPrompt(tokenizer.encode(text, add_special_tokens=False), text)


def require_tokenizer(tokenizer: Tokenizer | None, purpose: str) -> Tokenizer:
    """The tokenizer, or a ValueError that says what needs it."""
    if tokenizer is None:
        raise ValueError(
            f"{purpose} needs a tokenizer and this engine has none; give tokenizer=... when the engine is made, or "
            "pass prompts as token ids"
        )
    return tokenizer


def _listed(value: Any) -> Any:
    """An array, of JAX's too, as a list; anything else as it is."""
    if isinstance(value, str | Sequence | Mapping) or not hasattr(value, "__array__"):
        return value
    return np.asarray(value).tolist()


def _token_ids(ids: Any) -> list[int]:
    ids = _listed(ids)
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Sequence):
        raise TypeError(f"the prompt {ids!r} must be a str, a list of token ids, or a mapping with one of them")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise TypeError(f"a prompt's token ids hold {token!r}; every id must be an int")
    return [int(token) for token in ids]
