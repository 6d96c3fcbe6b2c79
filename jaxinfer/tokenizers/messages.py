"""Chat messages as callers send them, checked and brought to the one form that chat templates expect."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

# Names under which a message's reasoning is passed, the one that most templates read first.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def check_messages(messages: Sequence[Mapping[str, Any]], *, parts: bool = False) -> list[dict[str, Any]]:
    """A copy of a conversation that templates can render: `content` is always there, arguments are mappings.

    None (and missing) content becomes "", text parts are joined by newlines, JSON-string arguments of tool calls are
    parsed, other fields that are None are dropped. Reasoning is found under `reasoning_content` and `thinking`,
    whichever name it came by. Messages may be dataclasses or pydantic models, as OpenAI's client returns them.

    Args:
        messages: the conversation.
        parts: leave content that is a list as one, of ``{"type": "text", "text": ...}``.

    Raises:
        TypeError: `messages` is not a list of mappings, or something in it is not plain data.
        ValueError: it is empty, or a message is malformed; names the field.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(f"messages must be a list of dicts with role and content, not {type(messages).__name__}")
    if not messages:
        raise ValueError("messages=[] has nothing to answer; give at least one message with role and content")
    return [_check_message(message, f"messages[{i}]", parts) for i, message in enumerate(messages)]


def check_dicts(items: Any, name: str) -> list[dict[str, Any]]:
    """A copy of `tools` or `documents`.

    Raises:
        TypeError: not a list of mappings; a function, say, must be described first.
    """
    if isinstance(items, (str, bytes, Mapping)) or not isinstance(items, Sequence):
        raise TypeError(f"{name} must be a list of dicts, not {type(items).__name__}")
    copies = [plain_data(item, f"{name}[{i}]") for i, item in enumerate(items)]
    for i, copy in enumerate(copies):
        if not isinstance(copy, dict):
            raise TypeError(f"{name}[{i}] must be a dict, not {type(items[i]).__name__}")
    return copies


def is_message(value: Any) -> bool:
    """Whether it can be one message of a conversation: a mapping, a dataclass or a pydantic model."""
    fields = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return isinstance(value, Mapping) or fields or callable(getattr(value, "model_dump", None))


def plain_data(value: Any, name: str) -> Any:
    """A copy of JSON's types all the way down: templates are not trusted with objects that have methods.

    Raises:
        TypeError: a value of another type; names it.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # an enum's value, not its name
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {plain_data(key, name): plain_data(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain_data(getattr(value, item.name), name) for item in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):
        return plain_data(value.model_dump(), name)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return plain_data(value.item(), name)
    raise TypeError(
        f"{name} is of the type {type(value).__name__}; chat templates are given text, numbers, lists and dicts only"
    )


def _check_message(message: Any, name: str, parts: bool) -> dict[str, Any]:
    if not is_message(message):
        raise TypeError(f"{name} must be a dict with role and content, not {type(message).__name__}")
    given = plain_data(message, name)
    role = given.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{name}.role={role!r} must be a non-empty string such as 'user', 'assistant' or 'system'")
    checked = {str(key): value for key, value in given.items() if value is not None}
    checked["content"] = _content(checked.get("content"), f"{name}.content", parts)
    if "tool_calls" in checked:
        checked["tool_calls"] = _tool_calls(checked["tool_calls"], f"{name}.tool_calls")
    reasoning = next((checked[key] for key in _REASONING if key in checked), None)
    if reasoning is not None:
        checked = {"thinking": reasoning, **checked, "reasoning_content": reasoning}
    return checked


def _content(content: Any, name: str, parts: bool) -> str | list[dict[str, str]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [_part(part, f"{name}[{i}]") for i, part in enumerate(content)]
        return [{"type": "text", "text": text} for text in texts] if parts else "\n".join(texts)
    raise ValueError(f"{name} must be a string, a list of text parts or None, not {type(content).__name__}")


def _part(part: Any, name: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise ValueError(f"{name} must be a string or a dict with type and text, not {type(part).__name__}")
    kind = part.get("type", "text")
    if kind not in ("text", "input_text", "output_text"):
        raise ValueError(f"{name}.type={kind!r} is not supported; only text parts are")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError(f"{name}.text={text!r} must be a string")
    return text


def _tool_calls(calls: Any, name: str) -> list[Any]:
    if not isinstance(calls, list):
        raise ValueError(f"{name} must be a list of tool calls, not {type(calls).__name__}")
    for i, call in enumerate(calls):
        if not isinstance(call, dict):
            raise ValueError(f"{name}[{i}] must be a dict with function, not {type(call).__name__}")
        function, where = call.get("function", call), f"{name}[{i}].function"
        if not isinstance(function, dict):
            raise ValueError(f"{where} must be a dict with name and arguments, not {type(function).__name__}")
        function["arguments"] = _arguments(function.get("arguments"), f"{where}.arguments")
    return calls


def _arguments(arguments: Any, name: str) -> dict[str, Any]:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}={arguments!r} is not JSON: {error}; pass an object or its JSON text") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"{name} must be a JSON object, not {type(arguments).__name__}")
    return arguments
