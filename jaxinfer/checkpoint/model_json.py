"""A ModelConfig as JSON and back."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """All fields, those at their defaults too: a default may change between versions."""
    return dataclasses.asdict(config)


def config_from_json(fields: Any) -> ModelConfig:
    """The config that `config_to_json` wrote; a field that is missing takes its default.

    Raises:
        ValueError: not a mapping, a field is unknown or out of range; names the field.
    """
    config: ModelConfig = _read(ModelConfig, fields)
    return config


def _read(kind: Any, fields: Any) -> Any:
    if not isinstance(fields, Mapping):
        raise ValueError(f"a {kind.__name__} must be a JSON object, not {fields!r}")
    hints = typing.get_type_hints(kind)
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {unknown[0]!r}; it was written by a newer jaxinfer: update it")
    try:
        return kind(**{name: _value(hints[name], value) for name, value in fields.items()})
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from error


def _value(hint: Any, value: Any) -> Any:
    """JSON has neither tuples nor dataclasses."""
    if isinstance(value, list):
        inside = [kind for kind in typing.get_args(hint) if typing.get_origin(kind) is tuple] or [hint]
        items = [kind for kind in typing.get_args(inside[0]) if kind is not Ellipsis] or [Any]
        return tuple(_value(items[min(i, len(items) - 1)], item) for i, item in enumerate(value))
    if isinstance(value, Mapping):
        for kind in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(kind):
                return _read(kind, value)
    return value
