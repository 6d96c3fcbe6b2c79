"""GPT-NeoX and Pythia (arXiv:2204.06745, arXiv:2304.01373): layer norms, a quarter of each head rotated, and attention
and MLP side by side."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.base import BASE_KEYS, base_fields
from jaxinfer.models.families.family import Family, Weight
from jaxinfer.models.families.hf_config import flag, naming, number
from jaxinfer.models.families.weights import norm

LAYER, LEAF = "gpt_neox.layers.{i}.", "layers_{i}/"
KEYS = {"layer_norm_eps", "attention_bias", "use_parallel_residual", "rotary_pct", "rotary_emb_base"}


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Makes a ModelConfig from a GPTNeoXConfig's keys; what is missing takes GPTNeoXConfig's default.

    Raises:
        ValueError: a shape key is missing, or a setting is not supported.
    """
    defaults: dict[str, Any] = {
        "theta": number(config, "rotary_emb_base", 10000.0),
        "partial": number(config, "rotary_pct", 0.25),
        "eps_key": "layer_norm_eps",
        "eps": 1e-5,
        "act": "gelu",
    }
    bias = flag(config, "attention_bias", True)
    said = {**config, "num_key_value_heads": None, "head_dim": None}
    with naming({"partial_rotary_factor": "rotary_pct"} if "rotary_pct" in config else {}):
        base = base_fields(said, **defaults)
    return ModelConfig(
        **base,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        norm="layer",
        norm_bias=True,
        mlp_gated=False,
        block="parallel" if flag(config, "use_parallel_residual", True) else "sequential",
    )


def _linear(hf: str, leaf: str, shape: str, attention: bool) -> tuple[Weight, Weight]:
    bias = shape.split()[0]
    return (
        Weight(f"{LAYER}{hf}.weight", "", f"{LEAF}{leaf}/kernel", shape),
        Weight(f"{LAYER}{hf}.bias", "", f"{LEAF}{leaf}/bias", bias, when=lambda c: c.qkv_bias or not attention),
    )


GPT_NEOX = Family(
    name="gpt_neox",
    architectures=("GPTNeoXForCausalLM",),
    model_config=model_config,
    config_keys=(BASE_KEYS - {"num_key_value_heads", "head_dim"}) | KEYS,
    ignored_keys=frozenset({"classifier_dropout", "num_key_value_heads"}),
    ignored_weights=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    weights=(
        Weight("gpt_neox.embed_in.weight", "", "embed/embedding", "V D"),
        *norm(f"{LAYER}input_layernorm", "", f"{LEAF}attn_norm"),
        *_linear("attention.query_key_value", "attn/qkv", "N3H D", attention=True),
        *_linear("attention.dense", "attn/out", "D NH", attention=True),
        *norm(f"{LAYER}post_attention_layernorm", "", f"{LEAF}mlp_norm"),
        *_linear("mlp.dense_h_to_4h", "mlp/up", "F D", attention=False),
        *_linear("mlp.dense_4h_to_h", "mlp/down", "D F", attention=False),
        *norm("gpt_neox.final_layer_norm", "", "final_norm"),
        Weight("embed_out.weight", "", "lm_head/kernel", "V D", when=lambda c: not c.tie_word_embeddings),
    ),
)
