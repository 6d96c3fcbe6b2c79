"""The config.json that describes a model to Hugging Face's libraries."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.hf_config import ACTIVATIONS
from jaxinfer.models.registry import FAMILIES, family_of_hf_config

HFConfig = dict[str, Any]
TOKEN_KEYS = {"bos_token_id": "tokenizer.ggml.bos_token_id", "pad_token_id": "tokenizer.ggml.padding_token_id"}


def exported_config(checkpoint: Checkpoint) -> tuple[Family, HFConfig]:
    """A family and a config.json that reads back as exactly this checkpoint's ModelConfig.

    Returns:
        The family, whose table names the tensors, and the config with its architecture and end ids.

    Raises:
        ValueError: no family's config can say what the model is; names the fields that would be lost.
    """
    config, lost = checkpoint.model_config, None
    for family in _families(checkpoint):
        for candidate in _candidates(family, config, checkpoint.hf_config):
            differing = _differing(family, candidate, config)
            if not differing:
                return family, _with_names(family, candidate, checkpoint)
            if differing[0] and (lost is None or len(differing) < len(lost)):
                lost = differing
    raise ValueError(
        f"{checkpoint.path}: no Hugging Face config of a supported family says what this model is; it would lose "
        f"{', '.join(lost or ['everything'])}. The format 'orbax' keeps it"
    )


def _families(checkpoint: Checkpoint) -> tuple[Family, ...]:
    """Those whose config may say what the model is, that which its own config names before all others."""
    if checkpoint.family is not None:
        return (checkpoint.family,)
    named = _named_family(checkpoint.hf_config)
    return FAMILIES if named is None else (named, *(family for family in FAMILIES if family is not named))


def _named_family(own: Mapping[str, Any] | None) -> Family | None:
    try:
        return None if own is None else family_of_hf_config(own)
    except ValueError:
        return None


def _candidates(family: Family, config: ModelConfig, own: Mapping[str, Any] | None) -> Iterator[HFConfig]:
    spellings = [hf for hf, ours in ACTIVATIONS.items() if ours == config.hidden_act]
    spelled = config.hidden_act if config.hidden_act in spellings else spellings[-1]
    written = {**asdict(config), "attention_bias": config.qkv_bias, "hidden_act": spelled}
    written = {key: value for key, value in written.items() if key in family.config_keys}
    if own is not None and own.get("architectures"):
        if _named_family(own) is family:  # others may read it alike, but have other names for the tensors
            yield dict(own)
    elif own is not None:
        # A GGUF file says by its tensors whether there are biases and a head, and names a type where it scales nothing.
        told = {key: value for key, value in own.items() if value != {"rope_type": "none"}}
        yield {**told, **{key: written[key] for key in written if key.endswith("_bias") or key.startswith("tie_")}}
    yield written


def _differing(family: Family, candidate: HFConfig, config: ModelConfig) -> list[str]:
    """Fields that come out otherwise; an empty name if the family refuses the candidate."""
    try:
        read = family.model_config(candidate)
    except (ValueError, TypeError):
        return [""]
    return [field.name for field in fields(config) if getattr(read, field.name) != getattr(config, field.name)]


def _with_names(family: Family, candidate: HFConfig, checkpoint: Checkpoint) -> HFConfig:
    if candidate.get("architectures"):
        return candidate  # a config.json that came with the model says the rest, too
    named: HFConfig = {"architectures": [family.architectures[0]], "model_type": family.name, **candidate}
    for key, field in TOKEN_KEYS.items():
        if checkpoint.metadata is not None and field in checkpoint.metadata:
            named[key] = checkpoint.metadata[field]
    ends = sorted(checkpoint.eos_token_ids)
    if ends:
        named["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return named
