"""What a checkpoint is, in numbers and names, from its headers alone."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.checkpoint.weight_map import expected_weights
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.rope_scaling import RopeScaling

PLAIN_DTYPES = ("float64", "float32", "float16", "bfloat16")
SCALE_BYTES = 4  # of a quantised KV pool: a float32 for each head's key and each head's value of a token
NAMED_TOKENS = ("bos_token", "eos_token", "pad_token")


def summarise(checkpoint: Checkpoint) -> dict[str, Any]:
    """The facts by name, all of JSON's types. No weight is read; a tokenizer that does not load is a fact, too.

    Where there are no weights, their numbers are those that the config asks for, in the checkpoint's dtype.
    """
    config = checkpoint.model_config
    tokenizer, special, template = _tokenizer(checkpoint)
    nbytes: Counter[str] = Counter()
    num_tensors: Counter[str] = Counter()
    parameters = 0
    for dtype, size, stored in _tensors(checkpoint):
        nbytes[dtype] += stored
        num_tensors[dtype] += 1
        parameters += size
    quantised = {dtype.upper(): num_tensors[dtype] for dtype, _ in nbytes.most_common() if dtype not in PLAIN_DTYPES}
    return {
        "path": str(checkpoint.path),
        "format": _format(checkpoint),
        "architecture": _architecture(checkpoint),
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": {
            "query": config.num_attention_heads,
            "key_value": config.num_key_value_heads,
            "width": config.head_dim,
        },
        "vocab_size": config.vocab_size,
        "weights": checkpoint.has_weights,
        "tied_head": config.tie_word_embeddings,
        "parameters": parameters,
        "bytes": sum(nbytes.values()),
        "bytes_by_dtype": dict(nbytes.most_common()),
        "quantisation": None if checkpoint.layout is None else str(checkpoint.layout),
        "quantised_tensors": quantised,
        "dtype": checkpoint.dtype,
        "context": config.max_position_embeddings,
        "rope": {"theta": config.rope_theta, "scaling": _unusual(config, "rope_", ("rope_theta",))},
        "other_settings": _unusual(config, "", SHOWN),
        "tokenizer": tokenizer,
        "special_tokens": special,
        "eos_token_ids": sorted(checkpoint.eos_token_ids),
        "chat_template": template,
        "generation_config": dict(checkpoint.generation_config),
        "kv_bytes_per_token": kv_bytes_per_token(config),
    }


def kv_bytes_per_token(config: ModelConfig) -> dict[str, int]:
    """dtype of the cache -> bytes of one token's keys and values in all layers; codes count with their scales."""
    rows = config.num_hidden_layers * 2 * config.num_key_value_heads
    width = config.head_dim
    return {
        "float32": rows * width * 4,
        "bfloat16": rows * width * 2,
        "int8": rows * (width + SCALE_BYTES),
        "fp8": rows * (width + SCALE_BYTES),
        "int4": rows * (width // 2 + SCALE_BYTES),
    }


SHOWN = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
)
"""Settings that have a fact of their own."""
SCALING_NUMBERS = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow")}
"""Numbers of a kind of rotary scaling that mean something at their default, too."""


def _unusual(config: ModelConfig, prefix: str, shown: tuple[str, ...]) -> dict[str, Any]:
    """Settings that begin with the prefix ("": all but the rotary ones) and are not at their default."""
    found = {}
    for item in fields(config):
        if item.name in shown or not item.name.startswith(prefix) or (not prefix and item.name.startswith("rope_")):
            continue
        value = getattr(config, item.name)
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        if value != default:
            found[item.name] = _scaling(value) if isinstance(value, RopeScaling) else _plain(value)
    return found


def _scaling(scaling: RopeScaling) -> dict[str, Any]:
    """Kind and numbers: those of the kind, and others that are not at their default."""
    own = SCALING_NUMBERS.get(scaling.kind, ())
    values = {item.name: (getattr(scaling, item.name), item.default) for item in fields(scaling)}
    return {name: _plain(value) for name, (value, default) in values.items() if name in own or value != default}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, int, int]]:
    """dtype, values and bytes of everything that is, or would be, loaded."""
    if checkpoint.leaves is not None:
        for leaf in checkpoint.leaves.values():
            yield leaf.dtype, leaf.size, leaf.nbytes
    if checkpoint.family is not None and not checkpoint.has_weights:
        itemsize = 4 if checkpoint.dtype == "float32" else 2
        for _, _, slot in expected_weights(checkpoint.family, checkpoint.model_config, "hf"):
            yield checkpoint.dtype, math.prod(slot.shape), math.prod(slot.shape) * itemsize
    for placement in checkpoint.placements:
        yield placement.tensor.dtype, math.prod(placement.slot.shape), placement.nbytes


def _format(checkpoint: Checkpoint) -> str:
    if checkpoint.leaves is not None:
        return "Orbax"
    if not checkpoint.has_weights:
        return "config only"
    return "safetensors" if checkpoint.metadata is None else "GGUF"


def _architecture(checkpoint: Checkpoint) -> str:
    config: Mapping[str, Any] = checkpoint.hf_config or {}
    names = config.get("architectures") or ()
    if names:
        return str(names[0])
    return "unnamed" if checkpoint.family is None else checkpoint.family.architectures[0]


def _tokenizer(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Facts of the tokenizer, its named special tokens, and whether there is a chat template."""
    try:
        tokenizer = checkpoint.tokenizer()
    except ValueError as error:
        return {"error": str(error)}, {}, False
    kind = {"HFTokenizer": "tokenizers", "SentencePieceTokenizer": "sentencepiece"}[type(tokenizer).__name__]
    special = {}
    for name in NAMED_TOKENS:
        token_id = getattr(tokenizer, f"{name}_id")
        if token_id is not None:
            special[name] = {"text": tokenizer.token_text(token_id), "id": token_id}
    facts = {"kind": kind, "vocab_size": tokenizer.vocab_size, "num_special_tokens": len(tokenizer.all_special_ids)}
    return facts, special, tokenizer.chat_template is not None
