"""Reading the rotary settings of a Hugging Face config, in every spelling they have had."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxinfer.models.families.hf_config import HFConfig, optional
from jaxinfer.models.rope_scaling import ROPE_TYPES, RopeScaling

ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"})
PLAIN = (None, "none", "default")
SPELLINGS = {"su": "longrope"}  # early Phi-3
LAYER_TYPES = ("full_attention", "sliding_attention")
_NUMBERS = {
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
}
_OTHER_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}


class Rope(NamedTuple):
    """The rotary settings of a config.

    Attributes:
        theta: base.
        partial: share of a head's channels that are rotated.
        scaling: None for plain frequencies.
        local_theta: base of the windowed layers, None where there is no other.
    """

    theta: float
    partial: float
    scaling: RopeScaling | None
    local_theta: float | None


def read_rope(
    config: HFConfig,
    max_positions: int,
    *,
    theta: float = 10000.0,
    partial: float = 1.0,
    local_theta: float | None = None,
) -> Rope:
    """Reads ``rope_theta``, ``partial_rotary_factor``, ``rope_scaling`` (keys ``type`` or ``rope_type``) and
    ``rope_parameters``, the latter also as one mapping for each type of layer.

    Args:
        config: a Hugging Face config.
        max_positions: its context length.
        theta, partial, local_theta: what the family takes where the config does not say.

    Raises:
        ValueError: an unknown type or number of scaling, by name.
    """
    key = "rope_parameters" if optional(config, "rope_parameters", {}) else "rope_scaling"
    settings = optional(config, key, {})
    if not isinstance(settings, Mapping):
        raise ValueError(f"{key}={settings!r} must be a mapping or null")
    local: Mapping[str, Any] = {}
    if any(kind in settings for kind in LAYER_TYPES):
        unknown = sorted(set(settings) - set(LAYER_TYPES))
        if unknown:
            raise ValueError(f"{key} has {unknown[0]!r} beside {' and '.join(LAYER_TYPES)}, which is not supported")
        local = settings.get("sliding_attention") or {}
        settings = settings.get("full_attention") or {}
        local_theta = float(optional(local, "rope_theta", local_theta or theta))
        if _kind(local) not in PLAIN:
            raise ValueError(f"{key} of type {_kind(local)!r} on windowed layers is not supported; only 'default' is")
    return Rope(
        theta=float(optional(settings, "rope_theta", optional(config, "rope_theta", theta))),
        partial=float(optional(settings, "partial_rotary_factor", optional(config, "partial_rotary_factor", partial))),
        scaling=_scaling(config, key, settings, max_positions),
        local_theta=local_theta,
    )


def _kind(settings: Mapping[str, Any]) -> Any:
    kind = settings.get("rope_type", settings.get("type"))
    return SPELLINGS.get(kind, kind) if isinstance(kind, str) else kind


def _scaling(config: HFConfig, key: str, settings: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
    kind = _kind(settings)
    if kind in PLAIN:
        return None
    if kind not in ROPE_TYPES:
        raise ValueError(f"{key} of type {kind!r} is not supported; use one of default, {', '.join(ROPE_TYPES)}")
    unknown = sorted(set(settings) - _NUMBERS[kind] - _OTHER_KEYS)
    if unknown:
        raise ValueError(f"{key} of type {kind!r} has {unknown[0]!r}, which is not supported")
    original = optional(settings, "original_max_position_embeddings", max_positions)
    if kind == "dynamic":
        original = max_positions  # that is what transformers measures the length by
    elif config.get("original_max_position_embeddings") is not None:
        original = config["original_max_position_embeddings"]  # Phi-3 keeps it outside
    numbers: dict[str, Any] = {name: settings[name] for name in _NUMBERS[kind] if settings.get(name) is not None}
    if kind in ("linear", "dynamic", "llama3") and "factor" not in numbers:
        raise ValueError(f"{key} of type {kind!r} has no 'factor'")
    if kind in ("yarn", "longrope"):
        numbers.setdefault("factor", max_positions / original)
    for name in {"short_factor", "long_factor"} & numbers.keys():
        numbers[name] = tuple(map(float, numbers[name]))
    return RopeScaling(kind, original, **numbers)
