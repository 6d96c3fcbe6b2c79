"""SmolLM3: Llama in which every fourth layer does not rotate (NoPE, arXiv:2501.18795)."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families import llama
from jaxinfer.models.families.base import WINDOW_KEYS, base_fields
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.hf_config import flag, layer_count, size, whole_numbers, windowed_layers, windows
from jaxinfer.models.families.weights import LLAMA_WEIGHTS


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Makes a ModelConfig from a SmolLM3Config's keys; what is missing takes SmolLM3Config's default.

    Raises:
        ValueError: a shape key is missing, or a setting is not supported.
    """
    count, interval = layer_count(config), size(config, "no_rope_layer_interval", 4)
    # In spite of its name, no_rope_layers has a 1 for each layer that rotates.
    flags = whole_numbers(config, "no_rope_layers", count)
    rotates = tuple(map(bool, flags or [(layer + 1) % interval for layer in range(count)]))
    windowed = flag(config, "use_sliding_window", False) and config.get("sliding_window") is not None
    layers = windowed_layers(config, lambda layer: windowed and not rotates[layer])
    return ModelConfig(
        **base_fields(config, max_positions=32768, theta=2e6, tied=True),
        **llama.biases(config),
        **windows(config, layers),
        rope_layers=None if all(rotates) else rotates,
    )


SMOLLM3 = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    model_config=model_config,
    config_keys=llama.CONFIG_KEYS | WINDOW_KEYS | {"no_rope_layers", "no_rope_layer_interval", "use_sliding_window"},
    ignored_keys=frozenset({"max_window_layers"}),
    weights=LLAMA_WEIGHTS,
    gguf_pairwise_rotary=True,
)
