"""Chat messages as callers send them, checked and brought to the one form that chat templates expect."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy of a conversation that templates can render: `content` is always a str, arguments are mappings.

    None (and missing) content becomes "", text parts are joined by newlines, JSON-string arguments of tool calls are
    parsed, other fields that are None are dropped.

    Raises:
        TypeError: `messages` is not a list of mappings.
        ValueError: it is empty, or a message is malformed; names the field.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(f"messages must be a list of dicts with role and content, not {type(messages).__name__}")
    if not messages:
        raise ValueError("messages=[] has nothing to answer; give at least one message with role and content")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TypeError(f"{name} must be a dict with role and content, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{name}.role={role!r} must be a non-empty string such as 'user', 'assistant' or 'system'")
    checked = {str(key): _copy(value) for key, value in message.items() if value is not None}
    checked["content"] = _content(message.get("content"), f"{name}.content")
    if "tool_calls" in checked:
        checked["tool_calls"] = _tool_calls(checked["tool_calls"], f"{name}.tool_calls")
    return checked


def _copy(value: Any) -> Any:
    """Plain containers all the way down, so that neither we nor a template can change the caller's objects."""
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(item) for item in value]
    return value


def _content(content: Any, name: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        return "\n".join(_part(part, f"{name}[{i}]") for i, part in enumerate(content))
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
