"""GPT-2 (Radford et al., 2019): learned positions, layer norms, biases everywhere, weights stored ``[in, out]``."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.base import base_fields
from jaxinfer.models.families.family import Family, Weight
from jaxinfer.models.families.hf_config import flag, naming
from jaxinfer.models.families.weights import norm

NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
}
OTHER_KEYS = frozenset({"vocab_size", "layer_norm_epsilon", "tie_word_embeddings"})
LAYER, LEAF = "transformer.h.{i}.", "layers_{i}/"
# fmt: off
IGNORED_KEYS = frozenset({
    "n_ctx", "attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "reorder_and_upcast_attn", "task_specific_params",
    "add_cross_attention",
})
# fmt: on


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Makes a ModelConfig from a GPT2Config's keys; what is missing takes GPT2Config's default.

    Raises:
        ValueError: a shape key is missing, or a setting is not supported.
    """
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if flag(config, key, False):
            raise ValueError(f"{key}=True is not supported")
    named = {name: config.get(key) for key, name in NAMES.items()} | {key: config.get(key) for key in OTHER_KEYS}
    width = named["hidden_size"]
    if named["intermediate_size"] is None and isinstance(width, int):
        named["intermediate_size"] = 4 * width
    defaults: dict[str, Any] = {
        "max_positions": 1024,
        "act": "gelu_new",
        "eps_key": "layer_norm_epsilon",
        "eps": 1e-5,
        "tied": True,
    }
    with naming({name: key for key, name in NAMES.items()}):
        return ModelConfig(
            **base_fields(named, **defaults),
            qkv_bias=True,
            o_bias=True,
            mlp_bias=True,
            learned_positions=True,
            norm="layer",
            norm_bias=True,
            mlp_gated=False,
            query_scale=None if flag(config, "scale_attn_weights", True) else 1.0,
        )


def _linear(hf: str, leaf: str, shape: str, axes: tuple[int, ...], bias: str, bias_axes: tuple[int, ...] = ()) -> Any:
    return (
        Weight(f"{LAYER}{hf}.weight", "", f"{LEAF}{leaf}/kernel", shape, axes=axes),
        Weight(f"{LAYER}{hf}.bias", "", f"{LEAF}{leaf}/bias", bias, axes=bias_axes),
    )


GPT2 = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    model_config=model_config,
    config_keys=OTHER_KEYS | NAMES.keys() | {"scale_attn_weights", "scale_attn_by_inverse_layer_idx"},
    ignored_keys=IGNORED_KEYS,
    ignored_weights=(".attn.bias", ".attn.masked_bias"),
    optional_prefix="transformer.",
    weights=(
        Weight("transformer.wte.weight", "", "embed/embedding", "V D"),
        Weight("transformer.wpe.weight", "", "embed_positions/embedding", "P D"),
        *norm(f"{LAYER}ln_1", "", f"{LEAF}attn_norm"),
        *_linear("attn.c_attn", "attn/qkv", "D 3NH", (3, 1, 0, 2), "3NH", (1, 0, 2)),
        *_linear("attn.c_proj", "attn/out", "NH D", (1, 2, 3, 0), "D"),
        *norm(f"{LAYER}ln_2", "", f"{LEAF}mlp_norm"),
        *_linear("mlp.c_fc", "mlp/up", "D F", (1, 0), "F"),
        *_linear("mlp.c_proj", "mlp/down", "F D", (1, 0), "D"),
        *norm("transformer.ln_f", "", "final_norm"),
        Weight("lm_head.weight", "", "lm_head/kernel", "V D", when=lambda c: not c.tie_word_embeddings),
    ),
)
