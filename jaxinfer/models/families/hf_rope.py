"""Reading the rotary settings of a Hugging Face config, in every spelling they have had."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxinfer.models.families.hf_config import HFConfig, flag, number, numbers, optional, size
from jaxinfer.models.rope_scaling import ROPE_TYPES, RopeScaling

ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"})
PLAIN = (None, "none", "default")
SPELLINGS = {"su": "longrope"}  # early Phi-3
LAYER_TYPES = ("full_attention", "sliding_attention")
_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (),
    "longrope": (),
}
_OPTIONAL = {
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
}
_MAY_BE_ZERO = ("mscale", "mscale_all_dim")
# "finetuned" says how the weights came about, nothing of the frequencies.
_OTHER_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
_OTHER_KEYS |= {"finetuned"}


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

    As in transformers, ``rope_scaling`` counts where both are there: it takes the place of ``rope_parameters``, and is
    added to those of the full layers where these are for each type of layer.

    Args:
        config: a Hugging Face config.
        max_positions: its context length.
        theta, partial, local_theta: what the family takes where the config does not say.

    Raises:
        ValueError: an unknown type or number of scaling, by name, or two settings of which one would be lost.
    """
    theta, partial = number(config, "rope_theta", theta), _share(config, "", partial)
    key, settings, local = _settings(config)
    if local is not None:
        local_theta = number(local, "rope_theta", local_theta or theta, within="rope_parameters.sliding_attention.")
        if _kind(local) not in PLAIN:
            raise ValueError(f"{key} of type {_kind(local)!r} on windowed layers is not supported; only 'default' is")
    elif key == "rope_scaling":
        _refuse_lost(config, settings, {"rope_theta": theta, "partial_rotary_factor": partial})
    rope = Rope(
        theta=number(settings, "rope_theta", theta, within=f"{key}."),
        partial=_share(settings, f"{key}.", partial),
        scaling=_scaling(config, key, settings, max_positions),
        local_theta=local_theta,
    )
    if rope.scaling is not None:
        rope.scaling.check_theta(rope.theta)
    return rope


def _share(settings: Mapping[str, Any], within: str, default: float) -> float:
    share = number(settings, "partial_rotary_factor", default, within=within)
    if share > 1:
        raise ValueError(f"{within}partial_rotary_factor={share} must be at most 1, the whole head")
    return share


def _settings(config: HFConfig) -> tuple[str, Mapping[str, Any], Mapping[str, Any] | None]:
    """The key that counts, its settings, and those of the windowed layers where they have their own."""
    scaling, parameters = _mapping(config, "rope_scaling"), _mapping(config, "rope_parameters")
    if not any(kind in parameters for kind in LAYER_TYPES):
        if any(kind in scaling for kind in LAYER_TYPES):
            parameters, scaling = scaling, {}
        else:
            return ("rope_scaling", scaling, None) if scaling else ("rope_parameters", parameters, None)
    key = "rope_scaling" if scaling else "rope_parameters"
    unknown = sorted(set(parameters) - set(LAYER_TYPES))
    if unknown:
        raise ValueError(
            f"rope_parameters has {unknown[0]!r} beside {' and '.join(LAYER_TYPES)}, which is not supported"
        )
    full, local = (_mapping(parameters, kind, "rope_parameters.") for kind in LAYER_TYPES)
    return key, {**full, **scaling}, local


def _mapping(config: Mapping[str, Any], key: str, within: str = "") -> Mapping[str, Any]:
    value = optional(config, key, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"{within}{key}={value!r} must be a mapping or null")
    return value


def _refuse_lost(config: HFConfig, settings: Mapping[str, Any], outside: Mapping[str, float]) -> None:
    """Raises ValueError where transformers would silently drop what ``rope_parameters`` says."""
    parameters = _mapping(config, "rope_parameters")
    for name, value in outside.items():
        said = parameters.get(name)
        if said is not None and said != optional(settings, name, value) and settings.get(name) is None:
            raise ValueError(
                f"rope_scaling takes the place of rope_parameters, whose {name}={said!r} would be lost; "
                f"give {name} in rope_scaling, too"
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
    names = {*_REQUIRED[kind], *_OPTIONAL.get(kind, ())}
    unknown = sorted(set(settings) - names - _OTHER_KEYS)
    if unknown:
        raise ValueError(f"{key} of type {kind!r} has {unknown[0]!r}, which is not supported")
    # Phi-3 keeps the original length outside.
    outside = size(config, "original_max_position_embeddings", None)
    original = outside or size(settings, "original_max_position_embeddings", None, within=f"{key}.")
    for name in _REQUIRED[kind]:
        if settings.get(name) is None and not (name == "original_max_position_embeddings" and original):
            raise ValueError(f"{key} of type {kind!r} has no {name!r}")
    if kind == "dynamic" or original is None:
        original = max_positions  # that is what transformers measures the length of "dynamic" by
    given = sorted(name for name in names & settings.keys() if settings[name] is not None)
    values = {name: _value(settings, name, f"{key}.") for name in given if name != "original_max_position_embeddings"}
    if kind in ("yarn", "longrope"):
        values.setdefault("factor", max_positions / original)
    return RopeScaling(kind, original, **values)


def _value(settings: Mapping[str, Any], name: str, within: str) -> Any:
    if name in ("short_factor", "long_factor"):
        return numbers(settings, name, within=within)
    if name == "truncate":
        return flag(settings, name, True, within=within)
    return number(settings, name, 1.0, zero=name in _MAY_BE_ZERO, within=within)
