"""Layers of every make, small."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes

# Matrices of few different shapes: each is a program to compile.
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MAKES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma": {"norm_unit_offset": True, "post_norms": True, "hidden_act": "gelu_tanh", "qk_norm": "head"},
    "cohere": {"norm": "layer", "block": "parallel_shared_norm"},
    "biased": {"norm": "layer", "norm_bias": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "stablelm": {"norm": "layer", "norm_bias": True, "block": "parallel", "qkv_bias": True},
    "relu": {"norm": "layer", "norm_bias": True, "mlp_gated": False, "hidden_act": "relu", "mlp_bias": True},
    "gelu": {"norm": "layer", "norm_bias": True, "mlp_gated": False, "hidden_act": "gelu", "qkv_bias": True},
    "olmo2": {"pre_norms": False, "post_norms": True, "qk_norm": "full"},
    "moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}


@pytest.fixture(scope="session")
def make_config() -> Callable[[str], ModelConfig]:
    """`make_config("gemma")`: one of `MAKES`."""
    return lambda name: ModelConfig(**SIZES | MAKES[name])


@pytest.fixture(scope="session")
def make_params() -> Callable[[ModelConfig], Any]:
    """Random parameters whose norms have weights of many sizes, so that some activations are much louder."""

    def make(config: ModelConfig) -> Any:
        rng = np.random.default_rng(0)

        def fill(path: Any, spec: Any) -> np.ndarray:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if name.endswith("scale"):
                values = rng.lognormal(0, 1, spec.shape) - (1.0 if config.norm_unit_offset else 0.0)
            else:
                values = rng.standard_normal(spec.shape) * (0.3 if name.endswith("bias") else 0.2)
            return values.astype(np.float32)

        return jax.tree_util.tree_map_with_path(fill, param_shapes(config))

    return make
