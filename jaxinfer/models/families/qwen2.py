"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama with biases on the query, key and value projections."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families import llama
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.hf_config import optional


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Makes a ModelConfig from a Qwen2Config's keys; what is missing takes Qwen2Config's default.

    Raises:
        ValueError: a shape key is missing, or a setting (sliding-window layers) is not supported.
    """
    if config.get("use_sliding_window"):
        raise ValueError("use_sliding_window=True is not supported; only full attention is")
    windowed = sorted(set(optional(config, "layer_types", ())) - {"full_attention"})
    if windowed:
        raise ValueError(f"layer_types contains {windowed[0]!r}, which is not supported; only 'full_attention' is")
    defaults = {"max_position_embeddings": 32768}
    return replace(llama.model_config(defaults | dict(config)), qkv_bias=True, o_bias=False)


QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_config=model_config,
    config_keys=(llama.CONFIG_KEYS - {"attention_bias"}) | {"use_sliding_window", "layer_types"},
    # Without use_sliding_window these two change nothing.
    ignored_keys=frozenset({"sliding_window", "max_window_layers"}),
    weights=llama.WEIGHTS,
)
