"""Published models by name, and the shape of a model of which only the size is known. Never imports JAX."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import ModelConfig

LONGEST = 1 << 20
"""Positions of a model of which only the size is known: no limit."""
_GENERIC_FFN_STEP = 256


def _gated(vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int = 0, **more: Any) -> ModelConfig:
    return ModelConfig(vocab, hidden, ffn, layers, heads, kv_heads, **more)


def _qwen2(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> ModelConfig:
    return _gated(
        vocab,
        hidden,
        ffn,
        layers,
        heads,
        kv_heads,
        max_position_embeddings=32768,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        qkv_bias=True,
        tie_word_embeddings=tied,
    )


def _qwen3(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **more: Any) -> ModelConfig:
    return _gated(
        151936,
        hidden,
        ffn,
        layers,
        heads,
        kv_heads,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        qk_norm="head",
        **more,
    )


def _gemma(vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **more: Any) -> ModelConfig:
    return _gated(
        vocab,
        hidden,
        ffn,
        layers,
        heads,
        kv_heads,
        head_dim=256,
        hidden_act="gelu_tanh",
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        norm_unit_offset=True,
        embedding_multiplier=math.sqrt(hidden),
        **more,
    )


_LLAMA3 = {"max_position_embeddings": 8192, "rope_theta": 5e5}
_LLAMA31 = {"max_position_embeddings": 131072, "rope_theta": 5e5}
_BIASED = {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "norm": "layer", "norm_bias": True, "mlp_gated": False}

PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "smollm2-135m": _gated(
            49152, 576, 1536, 30, 9, 3, max_position_embeddings=8192, rope_theta=1e5, tie_word_embeddings=True
        ),
        "gpt2": ModelConfig(
            50257,
            768,
            3072,
            12,
            12,
            max_position_embeddings=1024,
            hidden_act="gelu_tanh",
            learned_positions=True,
            tie_word_embeddings=True,
            **_BIASED,  # type: ignore[arg-type]
        ),
        "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, 151936, True),
        "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, 151936, True),
        "qwen2.5-3b": _qwen2(2048, 11008, 36, 16, 2, 151936, True),
        "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4, 152064, False),
        "qwen2.5-14b": _qwen2(5120, 13824, 48, 40, 8, 152064, False),
        "qwen2.5-32b": _qwen2(5120, 27648, 64, 40, 8, 152064, False),
        "qwen2.5-72b": _qwen2(8192, 29568, 80, 64, 8, 152064, False),
        "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, tie_word_embeddings=True),
        "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8),
        "qwen3-32b": _qwen3(5120, 25600, 64, 64, 8),
        "qwen3-30b-a3b": _qwen3(
            2048, 6144, 48, 32, 4, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768
        ),
        "llama-2-7b": _gated(32000, 4096, 11008, 32, 32, max_position_embeddings=4096),
        "llama-2-13b": _gated(32000, 5120, 13824, 40, 40, max_position_embeddings=4096),
        "llama-2-70b": _gated(32000, 8192, 28672, 80, 64, 8, max_position_embeddings=4096),
        "llama-3-8b": _gated(128256, 4096, 14336, 32, 32, 8, **_LLAMA3),
        "llama-3-70b": _gated(128256, 8192, 28672, 80, 64, 8, **_LLAMA3),
        "llama-3.1-8b": _gated(128256, 4096, 14336, 32, 32, 8, **_LLAMA31),
        "llama-3.1-70b": _gated(128256, 8192, 28672, 80, 64, 8, **_LLAMA31),
        "llama-3.1-405b": _gated(128256, 16384, 53248, 126, 128, 8, **_LLAMA31),
        "llama-3.2-1b": _gated(128256, 2048, 8192, 16, 32, 8, tie_word_embeddings=True, **_LLAMA31),
        "llama-3.2-3b": _gated(128256, 3072, 8192, 28, 24, 8, tie_word_embeddings=True, **_LLAMA31),
        "llama-3.3-70b": _gated(128256, 8192, 28672, 80, 64, 8, **_LLAMA31),
        "mistral-7b": _gated(32000, 4096, 14336, 32, 32, 8, max_position_embeddings=32768, rope_theta=1e6),
        "mixtral-8x7b": _gated(
            32000,
            4096,
            14336,
            32,
            32,
            8,
            max_position_embeddings=32768,
            rope_theta=1e6,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=14336,
        ),
        "gemma-2b": _gemma(256000, 2048, 16384, 18, 8, 1, max_position_embeddings=8192),
        "gemma-2-9b": _gemma(
            256000,
            3584,
            14336,
            42,
            16,
            8,
            max_position_embeddings=8192,
            post_norms=True,
            attn_softcap=50.0,
            logit_softcap=30.0,
            sliding_window=4096,
            window_layers=tuple(layer % 2 == 0 for layer in range(42)),
        ),
        "gemma-3-12b": _gemma(
            262208,
            3840,
            15360,
            48,
            16,
            8,
            max_position_embeddings=131072,
            rope_theta=1e6,
            local_rope_theta=1e4,
            post_norms=True,
            qk_norm="head",
            sliding_window=1024,
            window_layers=tuple(layer % 6 != 5 for layer in range(48)),
        ),
        "phi-4": _gated(100352, 5120, 17920, 40, 40, 10, max_position_embeddings=16384, rope_theta=250000.0),
        "pythia-6.9b": ModelConfig(
            50432,
            4096,
            16384,
            32,
            32,
            max_position_embeddings=2048,
            rotary_dim=32,
            hidden_act="gelu",
            block="parallel",
            **_BIASED,  # type: ignore[arg-type]
        ),
        "smollm3-3b": _gated(
            128256, 2048, 11008, 36, 16, 4, max_position_embeddings=65536, rope_theta=5e6, tie_word_embeddings=True
        ),
        "olmo-2-7b": _gated(
            100352,
            4096,
            11008,
            32,
            32,
            max_position_embeddings=4096,
            rope_theta=5e5,
            qk_norm="full",
            pre_norms=False,
            post_norms=True,
        ),
    }
)
"""Public models, by the sizes in their config.json."""

# What a model of so many billion parameters looks like, if nothing else is known: grouped-query decoders.
_GENERIC = (
    "smollm2-135m",
    "qwen2.5-0.5b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "mistral-7b",
    "llama-3-8b",
    "qwen2.5-14b",
    "qwen2.5-32b",
    "llama-3-70b",
    "qwen2.5-72b",
    "llama-3.1-405b",
)
_BILLIONS = re.compile(r"(\d+(?:\.\d+)?) ?b(?:illions?)?", re.IGNORECASE)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_ENDINGS = re.compile(r"-(instruct|chat|it|hf|base|v\d+(\.\d+)?|instruct-\d+)(?=-|$)")


def preset_named(name: str) -> tuple[str, ModelConfig] | None:
    """A preset and its name, from "Llama-3-8B", or the Hub id of it or of its tuned forms; None for other names."""
    plain = name.rpartition("/")[2].lower().removeprefix("meta-")
    for candidate in (plain, _ENDINGS.sub("", plain)):
        if candidate in PRESETS:
            return candidate, PRESETS[candidate]
    return None


def billions(size: float | str) -> float | None:
    """Billions of parameters that `size` says: 7, 7.0, "7", "7B", "0.5b"; None for any other text.

    Raises:
        ValueError: not above 0, or beyond 10,000 billions: a number of parameters, not of billions.
    """
    if isinstance(size, str):
        match = _BILLIONS.fullmatch(size.strip()) or _NUMBER.fullmatch(size.strip())
        if match is None:
            return None
        size = float(match[0].split()[0].lower().rstrip("bilons"))
    if not 0 < size <= 10_000:
        raise ValueError(f"model_size={size} must be billions of parameters, such as 7, or a model's name")
    return float(size)


def generic_model(size: float) -> ModelConfig:
    """A model of `size` billion parameters: the published one nearest in size, its feed-forward fitted.

    So layers, heads and KV cache are those of a real model; any context is taken to be within its reach.

    Raises:
        ValueError: too small for the shape of even the smallest one.
    """
    from jaxinfer.planning.formulas import count_parameters

    def distance(name: str) -> float:
        return abs(math.log(count_parameters(PRESETS[name]).total / 1e9 / size))

    model = PRESETS[min(_GENERIC, key=distance)]
    surplus = size * 1e9 - count_parameters(model).total
    ffn = model.intermediate_size + surplus / (3 * model.hidden_size * model.num_hidden_layers)
    fitted = round(ffn / _GENERIC_FFN_STEP) * _GENERIC_FFN_STEP
    if fitted < _GENERIC_FFN_STEP:
        raise ValueError(f"model_size={size} billions is too small to be planned for; give a model's name or folder")
    return replace(model, intermediate_size=fitted, max_position_embeddings=LONGEST)
