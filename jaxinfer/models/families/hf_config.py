"""Reading Hugging Face config keys that most families share."""

from collections.abc import Mapping
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
ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})
REFUSED_KEYS = frozenset({"quantization_config", "partial_rotary_factor"})


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


def activation(config: HFConfig, default: str) -> str:
    """Returns our name of `hidden_act`; unknown ones raise ValueError."""
    name = optional(config, "hidden_act", default)
    if name not in ACTIVATIONS:
        raise ValueError(f"hidden_act={name!r} is not supported; use one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def rope_theta(config: HFConfig, default: float = 10000.0) -> float:
    """Returns the rotary base, whether it is spelled ``rope_theta`` or inside ``rope_parameters``.

    Raises:
        ValueError: the config asks for scaled frequencies, naming the type.
    """
    parameters = optional(config, "rope_parameters", {})
    for key, settings in (("rope_scaling", optional(config, "rope_scaling", {})), ("rope_parameters", parameters)):
        if not isinstance(settings, Mapping):
            raise ValueError(f"{key}={settings!r} must be a mapping or null")
        kind = settings.get("rope_type", settings.get("type", "default"))
        if kind not in (None, "none", "default"):
            raise ValueError(f"{key} of type {kind!r} is not supported; only plain RoPE (no {key}) is")
    return float(optional(config, "rope_theta", optional(parameters, "rope_theta", default)))


def refuse_unsupported(config: HFConfig) -> None:
    """Raises ValueError for settings that would change the result and that are not built."""
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise ValueError(
            f"quantization_config with quant_method={method!r} is not supported; load the unquantised checkpoint or a "
            "GGUF file"
        )
    if optional(config, "partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor={config['partial_rotary_factor']} is not supported; only checkpoints that rotate "
            "the whole head are"
        )
