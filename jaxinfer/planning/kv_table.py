"""KV bytes a token: what grouped queries save against a KV head for each query head, and what codes save. Never imports
JAX."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.formulas import kv_token_size
from jaxinfer.planning.presets import PRESETS

KV_DTYPES = ("auto", "int8", "fp8", "int4")
"""The columns: 16 bits, and codes with their float32 scales."""


def attention_kind(model: ModelConfig) -> str:
    """ "MHA", "GQA" or "MQA"."""
    if model.num_key_value_heads == model.num_attention_heads:
        return "MHA"
    return "MQA" if model.num_key_value_heads == 1 else "GQA"


def kv_table(names: Iterable[str] = tuple(PRESETS)) -> list[dict[str, Any]]:
    """One row a model: its heads, bytes a token in each cache dtype, and in 16 bits what the same model would take with
    a KV head for each query head ("mha") and with one for all ("mqa").

    Raises:
        KeyError: a name is not one of `PRESETS`.
    """
    return [_row(name, PRESETS[name]) for name in names]


def _row(name: str, model: ModelConfig) -> dict[str, Any]:
    mha = replace(model, num_key_value_heads=model.num_attention_heads)
    mqa = replace(model, num_key_value_heads=1)
    return {
        "model": name,
        "attention": attention_kind(model),
        "layers": model.num_hidden_layers,
        "heads": model.num_attention_heads,
        "kv_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "bytes_per_token": {dtype: kv_token_size(model, dtype) for dtype in KV_DTYPES},
        "mha": kv_token_size(mha),
        "mqa": kv_token_size(mqa),
    }
