"""Sizes from a model's numbers alone: parameters, weights by quantisation, keys and values, blocks. Never imports JAX.

Bytes are those of one device. Split over `tp` devices, each has a part of the layers' matrices and of the KV heads;
embedding, head and norms lie whole on each of them, as `jaxinfer.runner.deviceless_step` compiles it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jaxinfer.config import require_positive
from jaxinfer.models.config import LayerKind, ModelConfig
from jaxinfer.planning.memory import KV_CHANNEL_BITS, kv_row_bytes
from jaxinfer.sharding.model_split import ModelSplit

_KV_ALIASES = {"auto": "bfloat16", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "fp8_e4m3"}


@dataclass(frozen=True)
class WeightFormat:
    """How the matrices of a model's layers are stored; everything else stays in 16 bits (of "fp32": in 32).

    Attributes:
        bits: of one weight, with its share of what a group of weights has in common (scale, zero point).
        channel_bits: of each output channel, for formats with one scale a channel.
        down_bits: of one weight of the matrices that come last in a layer, beside `bits`: the scales of their groups,
            instead of those of their channels.
    """

    bits: float
    channel_bits: int = 0
    down_bits: float = 0


WEIGHT_FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        "fp32": WeightFormat(32),
        "fp16": WeightFormat(16),
        "bf16": WeightFormat(16),
        "int8": WeightFormat(8, channel_bits=32, down_bits=32 / 64),
        "int8_w8a8": WeightFormat(8, channel_bits=32),
        "fp8": WeightFormat(8, channel_bits=32),
        # Groups of 128: a 16-bit scale, and the zero point as a float, of 32 bits where groups differ in it.
        "awq": WeightFormat(4 + (16 + 32) / 128),
        "gptq": WeightFormat(4 + (16 + 16) / 128),
        # Groups of 128 with a scale and an offset in bfloat16.
        "int4": WeightFormat(4 + (16 + 16) / 128),
        # Blocks of 64 with a float32 scale (arXiv:2305.14314, without quantised scales).
        "nf4": WeightFormat(4 + 32 / 64),
        "fp4": WeightFormat(4 + 32 / 64),
    }
)
"""By the names that people give as `quantization`."""
_FORMAT_ALIASES = {
    "none": "fp16",
    "auto": "fp16",
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float": "fp32",
    "float32": "fp32",
    "w8a8": "int8_w8a8",
}


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters by what becomes of them.

    Attributes:
        embedding: token table, split over devices.
        head: output matrix of its own, split likewise; 0 where it is the token table.
        linear: matrices of the layers, experts included: what is quantised, and split over devices.
        channels: output channels of these matrices.
        down: those of `linear` in matrices that come last in a layer.
        down_channels: their output channels.
        split: biases, and norms of queries and keys, that are split with their matrix.
        whole: other norms and biases, routers, learned positions.
    """

    embedding: int
    head: int
    linear: int
    channels: int
    down: int
    down_channels: int
    split: int
    whole: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.head + self.linear + self.split + self.whole

    def on_device(self, tp: int = 1) -> int:
        """What one of `tp` devices holds."""
        return self.whole + -(-(self.embedding + self.head + self.linear + self.split) // tp)


def kv_cache_size(
    num_layers: int,
    num_heads: int,
    head_dim: int,
    seq_len: int,
    batch_size: int = 1,
    dtype_size: float = 2,
    *,
    num_kv_heads: int | None = None,
    kv_dtype: str | None = None,
) -> int:
    """Bytes of the keys and values of `batch_size` sequences of `seq_len` tokens.

    ``2 * layers * KV heads * head_dim * tokens * dtype_size``.

    Args:
        num_layers: layers of the model.
        num_heads: query heads; KV heads too, unless `num_kv_heads` is given (grouped- or multi-query attention).
        head_dim: channels of a head.
        seq_len: tokens of each sequence; 0 is none.
        batch_size: sequences.
        dtype_size: bytes of a channel: 2 for float16 and bfloat16, 1 for 8 bits, 0.5 for 4 bits; no scales counted.
        num_kv_heads: KV heads; must divide `num_heads`.
        kv_dtype: a cache dtype by name instead of `dtype_size`; the scales of "int8", "fp8" and "int4" are counted.

    Raises:
        ValueError: a number is out of range, or no such dtype.
        TypeError: a count is no int.
    """
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    counts = {"num_layers": num_layers, "num_heads": num_heads, "head_dim": head_dim, "batch_size": batch_size}
    for name, value in (counts | {"num_kv_heads": kv_heads}).items():
        require_positive(name, value)
    if isinstance(seq_len, bool) or not isinstance(seq_len, int):
        raise TypeError(f"seq_len={seq_len!r} must be an int")
    if seq_len < 0:
        raise ValueError(f"seq_len={seq_len} must be at least 0")
    if num_heads % kv_heads:
        raise ValueError(f"num_kv_heads={kv_heads} must divide num_heads={num_heads}")
    if not 0 < dtype_size <= 8:
        raise ValueError(f"dtype_size={dtype_size} must be bytes of one channel, such as 2 for float16")
    row = head_dim * dtype_size if kv_dtype is None else kv_row_size(head_dim, kv_dtype)
    return math.ceil(2 * num_layers * kv_heads * row * seq_len * batch_size)


def kv_row_size(head_dim: int, kv_dtype: str) -> int:
    """Bytes of one head's key, or value, of one token, with its scale."""
    return kv_row_bytes(head_dim, kv_format_name(kv_dtype))


def kv_format_name(kv_dtype: str) -> str:
    """The full name of a cache dtype: "fp8" is "fp8_e4m3", "auto" the 16 bits of most models on a GPU.

    Raises:
        ValueError: there is none of that name.
    """
    name = _KV_ALIASES.get(str(kv_dtype).lower(), str(kv_dtype).lower())
    if name not in KV_CHANNEL_BITS:
        raise ValueError(
            f"kv_cache_dtype={kv_dtype!r} is not known; use one of auto, fp8, {', '.join(KV_CHANNEL_BITS)}"
        )
    return name


def kv_token_size(model: ModelConfig, kv_dtype: str = "auto", tp: int = 1) -> int:
    """Bytes of one token's keys and values in all layers, on one of `tp` devices."""
    heads = ModelSplit(model, tp).part.num_key_value_heads
    return model.num_hidden_layers * 2 * heads * kv_row_size(model.head_dim, kv_dtype)


def sequence_blocks(seq_lens: Iterable[int], block_size: int = 16) -> tuple[int, ...]:
    """Blocks of the KV cache that sequences of so many tokens take, one number a sequence.

    Raises:
        ValueError: a length is negative.
        TypeError, ValueError: `block_size` is no int of at least 1.
    """
    require_positive("block_size", block_size)
    lengths = tuple(seq_lens)
    for length in lengths:
        if length < 0:
            raise ValueError(f"seq_lens has {length}; lengths are at least 0")
    return tuple(-(-length // block_size) for length in lengths)


def weight_format(quant: str | None) -> tuple[str, WeightFormat]:
    """A format's own name, and the format.

    Args:
        quant: a name of `WEIGHT_FORMATS`, a dtype's name, or None for 16 bits.

    Raises:
        ValueError: there is none of that name.
    """
    name = "fp16" if quant is None else str(quant).lower()
    name = _FORMAT_ALIASES.get(name, name)
    if name not in WEIGHT_FORMATS:
        raise ValueError(f"quant={quant!r} is not known; use one of {', '.join(WEIGHT_FORMATS)}")
    return name, WEIGHT_FORMATS[name]


def weight_size(num_params: float, quant: str | None = None) -> int:
    """Bytes of `num_params` weights that are all stored in one format: 7e9 in "fp16" are 14 GB.

    Raises:
        ValueError: an unknown format, or a negative number.
    """
    if not num_params >= 0:
        raise ValueError(f"num_params={num_params} must be at least 0")
    return math.ceil(num_params * weight_format(quant)[1].bits / 8)


def model_weight_size(model: ModelConfig, quant: str | WeightFormat | None = None, tp: int = 1) -> int:
    """Bytes of a model's parameters on one of `tp` devices, what fills up uneven parts included.

    The layers' matrices are in the format; embedding, head, norms, biases and routers stay in 16 bits.
    """
    name, kind = ("", quant) if isinstance(quant, WeightFormat) else weight_format(quant)
    count = count_parameters(ModelSplit(model, tp).padded)
    plain = 4 if name == "fp32" else 2
    channels = count.channels - (count.down_channels if kind.down_bits else 0)
    matrices = -(-count.linear // tp) * kind.bits / 8 + -(-channels // tp) * kind.channel_bits / 8
    matrices += -(-count.down // tp) * kind.down_bits / 8
    rest = count.whole + -(-(count.embedding + count.head + count.split) // tp)
    return math.ceil(matrices) + plain * rest


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Parameters of a model, as `jaxinfer.models.decoder` makes them."""
    kinds = model.layer_kinds
    layers = [_layer_parameters(model, kind) for kind in kinds]
    linear, channels, down, down_channels, split, whole = (sum(column) for column in zip(*layers, strict=True))
    width = model.hidden_size
    positions = model.max_position_embeddings if model.learned_positions else 0
    return ParameterCount(
        embedding=model.vocab_size * width,
        head=0 if model.tie_word_embeddings else model.vocab_size * width,
        linear=linear,
        channels=channels,
        down=down,
        down_channels=down_channels,
        split=split,
        whole=whole + positions * width + _norm_parameters(model),
    )


def _layer_parameters(model: ModelConfig, kind: LayerKind) -> tuple[int, int, int, int, int, int]:
    """(linear, channels, down, down_channels, split, whole) of one layer."""
    c, width = model, model.hidden_size
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    fused = queries + 2 * keys
    linear, channels = fused * width + width * queries, fused + width
    down, down_channels = 0, 0
    split, whole = fused * c.qkv_bias, width * c.o_bias
    whole += 2 * c.head_dim if c.qk_norm == "head" else 0
    split += queries + keys if c.qk_norm in ("heads", "full") else 0
    norms = c.pre_norms * (1 if c.block == "parallel_shared_norm" else 2) + c.post_norms * 2
    whole += norms * _norm_parameters(c)
    if kind.moe:
        hidden = c.num_experts * c.moe_intermediate_size
        linear, channels = linear + 3 * hidden * width, channels + 2 * hidden + width
        down, down_channels = hidden * width, width
        whole += c.num_experts * width
        if not c.shared_expert_intermediate_size:
            return linear, channels, down, down_channels, split, whole
        whole += width  # the shared expert's gate
    ffn = c.shared_expert_intermediate_size if kind.moe else c.intermediate_size
    inputs = 2 * ffn if c.mlp_gated else ffn
    return (
        linear + (inputs + ffn) * width,
        channels + inputs + width,
        down + ffn * width,
        down_channels + width,
        split + inputs * c.mlp_bias,
        whole + width * c.mlp_bias,
    )


def _norm_parameters(model: ModelConfig) -> int:
    return model.hidden_size * (2 if model.norm_bias else 1)
