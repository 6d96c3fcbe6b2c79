"""The least time a decode step can take: bytes that must move and operations, against the card's data sheet. Never
imports JAX."""

from dataclasses import dataclass

from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.formulas import count_parameters, kv_row_size
from jaxinfer.planning.gpu_specs import GPUSpec

ASSUMED_SECONDS_A_LAUNCH = 1e-6
"""From the end of one kernel of a CUDA graph to the start of the next. An assumption, not a measurement."""


@dataclass(frozen=True)
class Roofline:
    """Of one device and one step.

    Attributes:
        weight_bytes: parameters that are read: all but the embedding's rows that no token asks for.
        kv_bytes: keys and values that are read and written.
        logits_bytes: written and read.
        flops: of the matrix products and of attention.
    """

    weight_bytes: float
    kv_bytes: float
    logits_bytes: float
    flops: float

    @property
    def moved_bytes(self) -> float:
        """All that must cross the memory bus."""
        return self.weight_bytes + self.kv_bytes + self.logits_bytes

    def memory_seconds(self, gpu: GPUSpec) -> float:
        """At the data sheet's bandwidth; a copy reaches about nine tenths of it."""
        return self.moved_bytes / gpu.memory_bandwidth

    def compute_seconds(self, gpu: GPUSpec) -> float:
        """At the data sheet's rate of dense bfloat16 products."""
        return self.flops / gpu.bf16_flops

    def seconds(self, gpu: GPUSpec) -> float:
        """The longer of the two; what devices tell one another is not counted."""
        return max(self.memory_seconds(gpu), self.compute_seconds(gpu))


def decode_roofline(
    config: ModelConfig,
    batch: int,
    context: int,
    param_bytes: int,
    num_devices: int = 1,
    itemsize: int = 2,
    kv_dtype: str = "auto",
) -> Roofline:
    """Of a decode step of `batch` rows with `context` positions each, its layers split over `num_devices`.

    Args:
        config: the whole model.
        batch, context: B and the positions of each row.
        param_bytes: parameters of one device, in whatever format.
        num_devices: that share the model.
        itemsize: bytes of an activation, and of a value of embedding and head.
        kv_dtype: what keys and values are stored as; "auto" is `itemsize` bytes.
    """
    width = config.hidden_size
    # A tied table is read whole, as the head.
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * width // num_devices
    row = config.head_dim * itemsize if kv_dtype == "auto" else kv_row_size(config.head_dim, kv_dtype)
    seen = sum(min(context, kind.window or context) for kind in config.layer_kinds)
    token_bytes = 2 * config.num_key_value_heads * row / num_devices
    attention = 4 * config.num_attention_heads * config.head_dim * seen / num_devices
    products = count_parameters(config).on_device(num_devices) - looked_up
    return Roofline(
        weight_bytes=param_bytes - itemsize * max(looked_up - batch * width, 0),
        kv_bytes=batch * (seen + config.num_hidden_layers) * token_bytes,
        logits_bytes=2 * batch * config.vocab_size * itemsize / num_devices,
        flops=batch * (2 * products + attention),
    )
