"""Reading Hugging Face config keys that most families share."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

HFConfig = Mapping[str, Any]
Default = TypeVar("Default", int, float, bool, None)

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
MAX_LAYERS = 10_000


def required_size(config: HFConfig, key: str) -> int:
    """Returns a size of the network; raises ValueError if it is missing or no int of at least 1."""
    if config.get(key) is None:
        raise ValueError(f"the model config has no {key!r}; without it the shape of the network is unknown")
    return size(config, key, 0)


def optional(config: HFConfig, key: str, default: Any) -> Any:
    """Returns a key's value, or `default` when it is missing or null."""
    value = config.get(key)
    return default if value is None else value


def size(config: HFConfig, key: str, default: Default, *, minimum: int = 1, within: str = "") -> int | Default:
    """Returns an int, or `default` when it is missing or null; below `minimum` or no int raises ValueError.

    Args:
        within: what stands before the key in the message, as "rope_scaling.".
    """
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{within}{key}={value!r} must be an int of at least {minimum}")
    return value


def number(config: HFConfig, key: str, default: Default, *, zero: bool = False, within: str = "") -> float | Default:
    """Returns a finite number above 0 (or 0, where `zero`), or `default` when it is missing or null.

    Raises:
        ValueError: it is none, NaN and infinity included.
    """
    value = config.get(key)
    return default if value is None else _finite(f"{within}{key}", value, zero)


def numbers(config: HFConfig, key: str, *, within: str = "") -> tuple[float, ...]:
    """Returns a list of numbers above 0; raises ValueError if it is missing or another thing."""
    values = config.get(key)
    if not isinstance(values, list | tuple):
        raise ValueError(f"{within}{key}={values!r} must be a list of numbers")
    return tuple(_finite(f"{within}{key}[{index}]", value) for index, value in enumerate(values))


def _finite(name: str, value: Any, zero: bool = False) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not is_number or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name}={value!r} must be a number above 0{' or 0' if zero else ''}")
    return float(value)


def flag(config: HFConfig, key: str, default: bool, *, within: str = "") -> bool:
    """Returns a bool, or `default` when it is missing or null; other things, as "false" or 0, raise ValueError."""
    value = optional(config, key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{within}{key}={value!r} must be true or false")
    return value


def whole_numbers(config: HFConfig, key: str, length: int | None = None) -> tuple[int, ...] | None:
    """Returns a list of ints of at least 0 (true and false are 1 and 0), or None when it is missing or null.

    Raises:
        ValueError: another thing, or not `length` of them.
    """
    values = config.get(key)
    if values is None:
        return None
    if not isinstance(values, list | tuple) or not all(isinstance(item, int) and item >= 0 for item in values):
        raise ValueError(f"{key}={values!r} must be a list of ints of at least 0")
    if length is not None and len(values) != length:
        raise ValueError(f"{key} has {len(values)} entries for num_hidden_layers={length}")
    return tuple(map(int, values))


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Lets the errors raised inside speak of the file's keys, `names` of ours, as ValueErrors."""
    try:
        yield
    except (ValueError, TypeError) as error:
        message = re.sub(r"\w+(\.\w+)*", lambda word: names.get(word[0], word[0]), str(error))
        raise ValueError(message) from error


@contextmanager
def reading(source: object) -> Iterator[None]:
    """Lets whatever values of a file make go wrong inside name the file, as a ValueError."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{source}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError) as error:
        raise ValueError(f"{source}: a value is impossible ({type(error).__name__}: {error})") from error


def activation(config: HFConfig, default: str, key: str = "hidden_act") -> str:
    """Returns our name of the activation that `key` names; unknown ones raise ValueError."""
    name = optional(config, key, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"{key}={name!r} is not supported; use one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def layer_count(config: HFConfig) -> int:
    """Returns the number of layers; raises ValueError if it can only be a mistake."""
    count = required_size(config, "num_hidden_layers")
    if count > MAX_LAYERS:
        raise ValueError(f"num_hidden_layers={count} is more than {MAX_LAYERS}; the config is damaged")
    return count


def windowed_layers(config: HFConfig, default: Callable[[int], bool]) -> tuple[bool, ...]:
    """Which layers have a window: as `layer_types` says, else `default` of the layer's number.

    Raises:
        ValueError: a layer of another type, or too few of them.
    """
    count, types = layer_count(config), config.get("layer_types")
    if types is None:
        return tuple(map(default, range(count)))
    if not isinstance(types, list | tuple) or not all(isinstance(item, str) for item in types):
        raise ValueError(f"layer_types={types!r} must be a list of strings, one for each layer")
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(
            f"layer_types contains {unknown[0]!r}, which is not supported; only 'full_attention' and "
            "'sliding_attention' are"
        )
    if len(types) != count:
        raise ValueError(f"layer_types has {len(types)} entries for num_hidden_layers={count}")
    return tuple(kind == "sliding_attention" for kind in types)


def windows(config: HFConfig, layers: tuple[bool, ...]) -> dict[str, Any]:
    """The ModelConfig fields of `sliding_window` on `layers`; null or no layer means none.

    Raises:
        ValueError: there are windowed layers but no width.
    """
    if not any(layers):
        return {}
    width = size(config, "sliding_window", None)
    if width is None:
        raise ValueError("sliding_window=None must be an int of at least 1: some layers are windowed")
    return {"sliding_window": width, "window_layers": None if all(layers) else layers}
