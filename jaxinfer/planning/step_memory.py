"""What a step holds on a GPU beside weights and KV cache. Never imports JAX.

The formulas follow XLA's buffer assignment of the compiled step (`scripts/gpu_audit.py` and `jaxinfer plan --compile`
show it): lifetimes do not overlap, so of the layers' scratch memory and the sampler's the larger one counts.
"""

from dataclasses import dataclass

from jaxinfer.models.config import MAX_HIDDEN_VALUES, ModelConfig

SAMPLER_COPIES = 5
"""float32[R, V] that the sampler holds at its peak, the logits included."""
WORKSPACE_BYTES = 4 << 20
"""Of cuBLAS, for a product."""
LOGITS_IN_FLIGHT = 2
"""The engine starts a step before it has read the logits of the one before."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one device.

    Attributes:
        state: of each slot's sampling (counts and biases), kept between steps.
        logits: float32, of the steps in flight.
        inputs: what the host sends, and its parts on the device.
        scratch: the program's temporaries at their peak.
    """

    state: int
    logits: int
    inputs: int
    scratch: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.state + self.logits + self.inputs + self.scratch


def step_memory(
    model: ModelConfig,
    *,
    num_tokens: int,
    num_rows: int,
    table_width: int,
    itemsize: int = 2,
    tp: int = 1,
    rounds: bool = False,
) -> StepMemory:
    """Of the largest step, which draws with the full sampler.

    Args:
        model: the architecture.
        num_tokens: T, `max_num_batched_tokens`.
        num_rows: R, `max_num_seqs`.
        table_width: M, blocks of the longest request.
        itemsize: bytes of an activation.
        tp: devices that the layers are split over.
        rounds: whether activations are rounded to 8 bits (W8A8): products come out in 32 bits, before their scales.
    """
    logits = 4 * num_rows * model.vocab_size
    return StepMemory(
        state=2 * logits + 4 * num_rows,
        logits=LOGITS_IN_FLIGHT * logits,
        inputs=2 * 4 * (4 * num_tokens + num_rows * (table_width + 32)),
        scratch=max(
            int(_layer_scratch(model, num_tokens, tp, 4 / itemsize if rounds else 1) * itemsize) + WORKSPACE_BYTES,
            # Of several devices the parts are gathered, and then brought into rows.
            (SAMPLER_COPIES + 2 * (tp > 1)) * logits,
        ),
    )


def _layer_scratch(model: ModelConfig, num_tokens: int, tp: int, product: float) -> float:
    """Values held at the peak of a layer: the residual stream with attention's queries, keys and values twice over, or
    with the feed-forward's gate, up and product (without a gate: its hidden layer and its result). What comes out of a
    product takes `product` of the others."""
    width = model.hidden_size
    # Summed over the devices into another buffer; with norms behind the layers the sum waits for the norm.
    residual = width * (1 + (tp > 1) + 2 * model.post_norms)
    queries = model.num_attention_heads * model.head_dim // tp
    keys = model.num_key_value_heads * model.head_dim // tp
    normed = width * (product > 1)  # beside its codes
    attention = residual + normed + 2 * queries + product * (queries + 2 * keys)
    ffn = model.shared_expert_intermediate_size if model.num_experts else model.intermediate_size
    channels = -(-ffn // tp)
    gates = 2 if model.mlp_gated else 1
    dense = residual + normed + product * gates * channels + (channels if model.mlp_gated else width)
    peak = num_tokens * max(attention, dense)
    if not model.num_experts:
        return peak
    # Experts take a slice of the tokens at a time, so that gate and up of all have MAX_HIDDEN_VALUES at most.
    hidden = 2 * model.num_experts * model.moe_intermediate_size
    slices = -(-num_tokens * hidden // MAX_HIDDEN_VALUES)
    while num_tokens % slices:
        slices += 1
    experts = (product + 0.5) * hidden * (num_tokens // slices) / tp + 3 * num_tokens * width
    return max(peak, experts)
