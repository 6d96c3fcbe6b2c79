"""Reading Hugging Face config keys that most families share."""

from collections.abc import Callable, Mapping
from typing import Any

HFConfig = Mapping[str, Any]

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
MAX_LAYERS = 10_000
REFUSED_KEYS = frozenset({"quantization_config"})


def required_size(config: HFConfig, key: str) -> int:
    """Returns a size of the network; raises ValueError if it is missing or not an int."""
    value = config.get(key)
    if value is None:
        raise ValueError(f"the model config has no {key!r}; without it the shape of the network is unknown")
    if not isinstance(value, int):
        raise ValueError(f"{key}={value!r} must be an int")
    return value


def optional(config: HFConfig, key: str, default: Any) -> Any:
    """Returns a key's value, or `default` when it is missing or null."""
    value = config.get(key)
    return default if value is None else value


def activation(config: HFConfig, default: str, key: str = "hidden_act") -> str:
    """Returns our name of the activation that `key` names; unknown ones raise ValueError."""
    name = optional(config, key, default)
    if name not in ACTIVATIONS:
        raise ValueError(f"{key}={name!r} is not supported; use one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def refuse_unsupported(config: HFConfig) -> None:
    """Raises ValueError for settings that would change the result and that are not built."""
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise ValueError(
            f"quantization_config with quant_method={method!r} is not supported; load the unquantised checkpoint or a "
            "GGUF file"
        )


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
    width = config.get("sliding_window")
    if not any(layers):
        return {}
    if not isinstance(width, int) or width < 1:
        raise ValueError(f"sliding_window={width!r} must be an int of at least 1: some layers are windowed")
    return {"sliding_window": width, "window_layers": None if all(layers) else layers}
