"""What most families' config.json have in common: sizes, rotation, activation, tying."""

from typing import Any

from jaxinfer.models.families.hf_config import (
    HFConfig,
    activation,
    flag,
    number,
    required_size,
    size,
)
from jaxinfer.models.families.hf_rope import ROPE_KEYS, read_rope

# fmt: off
BASE_KEYS = ROPE_KEYS | {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "partial_rotary_factor", "hidden_act", "tie_word_embeddings",
}
WINDOW_KEYS = frozenset({"sliding_window", "layer_types"})
# fmt: on


def base_fields(
    config: HFConfig,
    *,
    max_positions: int = 2048,
    head_dim: int = 0,
    theta: float = 10000.0,
    partial: float = 1.0,
    local_theta: float | None = None,
    eps_key: str = "rms_norm_eps",
    eps: float = 1e-6,
    act: str = "silu",
    act_key: str = "hidden_act",
    tied: bool = False,
) -> dict[str, Any]:
    """The ModelConfig fields that `config` and, where it does not say, the family's defaults give.

    Raises:
        ValueError: a shape key is missing, or a setting is not supported.
    """
    hidden, heads = required_size(config, "hidden_size"), required_size(config, "num_attention_heads")
    head_dim = size(config, "head_dim", head_dim)
    positions = size(config, "max_position_embeddings", max_positions)
    rope = read_rope(config, positions, theta=theta, partial=partial, local_theta=local_theta)
    return {
        "vocab_size": required_size(config, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": required_size(config, "intermediate_size"),
        "num_hidden_layers": required_size(config, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": size(config, "num_key_value_heads", 0),
        "head_dim": head_dim,
        "max_position_embeddings": positions if rope.scaling is None else rope.scaling.reach(positions),
        "rope_theta": rope.theta,
        "rotary_dim": _rotary_dim(head_dim or hidden // heads, rope.partial),
        "rope_scaling": rope.scaling,
        "local_rope_theta": rope.local_theta,
        "rms_norm_eps": number(config, eps_key, eps),
        "hidden_act": activation(config, act, act_key),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", tied),
    }


def _rotary_dim(width: int, partial: float) -> int:
    rotated = int(width * partial)
    if partial < 1 and not rotated:
        raise ValueError(f"partial_rotary_factor={partial} rotates no channel of a head of {width}")
    return 0 if partial == 1 else rotated
