"""Conversations as callers give them."""

from typing import Any

import pytest

from jaxinfer.serving.inputs import conversation_list, render_chat

USER = {"role": "user", "content": "hi"}


class Message:
    """What OpenAI's client returns has this method."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def model_dump(self) -> dict[str, Any]:
        return self._fields


class Rendering:
    """Stands for a tokenizer: the text is the options, ids are its length."""

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        return f"{len(messages)} {options}"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(text), int(add_special_tokens)]


def test_one_conversation_or_several() -> None:
    answer = Message(role="assistant", content="yes")
    assert conversation_list([USER, answer]) == [[USER, answer]]
    assert conversation_list([[USER], [USER, answer]]) == [[USER], [USER, answer]]
    for wrong in (USER, "hi", [USER, "hi"], [[USER], answer], [[USER], USER]):
        with pytest.raises(TypeError, match="messages"):
            conversation_list(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"messages=\[\]"):
        conversation_list([])


def test_rendering_passes_options_on_and_adds_no_special_tokens() -> None:
    prompt = render_chat([USER], Rendering(), tools=None, thinking=False)  # type: ignore[arg-type]
    assert prompt.text == "1 {'tokenize': False, 'tools': None, 'thinking': False}"
    assert prompt.token_ids == [len(prompt.text), 0]


@pytest.mark.parametrize("name", ["messages", "tokenize"])
def test_variables_that_would_replace_arguments(name: str) -> None:
    with pytest.raises(ValueError, match=f"chat_template_kwargs holds '{name}'"):
        render_chat([USER], Rendering(), **{name: True})  # type: ignore[arg-type]


def test_without_a_tokenizer() -> None:
    with pytest.raises(ValueError, match=r"chat\(\) needs a tokenizer"):
        render_chat([USER], None)
