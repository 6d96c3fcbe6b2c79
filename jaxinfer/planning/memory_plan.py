"""Where the memory of each GPU goes when a model is served in a given way. Never imports JAX."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.formulas import WeightFormat, kv_token_size, model_weight_size
from jaxinfer.planning.gpu_specs import FP8_CAPABILITY, GPUSpec
from jaxinfer.planning.memory import DeviceBudget, blocks_for, held_tokens
from jaxinfer.planning.step_memory import StepMemory, step_memory

TYPICAL_SHARE = 3
"""Of many running requests, one holds one part in this many of the longest context on average."""


@dataclass(frozen=True)
class Setting:
    """How a model is served.

    Args:
        model: the architecture.
        gpu: the card.
        context: tokens of the longest request, `max_model_len`.
        max_seqs: requests that run at the same time.
        tp: GPUs that the layers are split over.
        quant: format of the weights, see `jaxinfer.planning.formulas.WEIGHT_FORMATS`.
        kv_dtype: of the KV cache.
        mean_context: tokens that a running request holds on average; None for a third of `context`.
        max_num_batched_tokens: tokens of a step.
        block_size: tokens of a block.
        utilization: share of the card's memory that may be used.
        stored: what the layers' matrices take where that is not just `quant`: those of a quantised checkpoint.
    """

    model: ModelConfig
    gpu: GPUSpec
    context: int
    max_seqs: int
    tp: int = 1
    quant: str = "fp16"
    kv_dtype: str = "auto"
    mean_context: int | None = None
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    utilization: float = 0.92
    stored: WeightFormat | None = None

    @property
    def weight_bytes(self) -> int:
        """Of the parameters on each GPU."""
        return model_weight_size(self.model, self.stored or self.quant, self.tp)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each GPU of a `Setting`; the KV cache takes what the rest leaves of the budget.

    Attributes:
        setting: what is planned for.
        weights: parameters.
        step: what a step holds beside weights and cache.
    """

    setting: Setting
    weights: int
    step: StepMemory

    @property
    def budget(self) -> int:
        """What may be used of the card."""
        return int(self.setting.utilization * self.setting.gpu.memory_bytes)

    @cached_property
    def block_bytes(self) -> int:
        """One block in all layers."""
        s = self.setting
        return s.block_size * kv_token_size(s.model, s.kv_dtype, s.tp)

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, the padding block included; 0 where not even the weights fit."""
        total = self.setting.gpu.memory_bytes
        budget = DeviceBudget(total, total, self.weights, self.step.total, self.setting.utilization)
        return max(budget.kv_bytes // self.block_bytes, 0)

    @property
    def kv_cache(self) -> int:
        """The cache."""
        return self.num_blocks * self.block_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens that the cache holds."""
        return max(self.num_blocks - 1, 0) * self.setting.block_size

    @property
    def total(self) -> int:
        """All that is used."""
        return self.weights + self.kv_cache + self.step.total

    @property
    def fits(self) -> bool:
        """Whether the cache holds what `max_seqs` requests need."""
        return self.num_blocks >= needed_blocks(self.setting)

    def with_context(self, context: int) -> int:
        """Bytes used if the cache held `max_seqs` requests of up to `context` tokens and nothing more."""
        return self.weights + self.step.total + needed_blocks(replace(self.setting, context=context)) * self.block_bytes


def memory_plan(setting: Setting) -> MemoryPlan:
    """The plan of a setting, by the formulas."""
    return MemoryPlan(setting, setting.weight_bytes, _step(setting))


def _step(setting: Setting) -> StepMemory:
    return step_memory(
        setting.model,
        num_tokens=max(setting.max_num_batched_tokens, setting.max_seqs),
        num_rows=setting.max_seqs,
        table_width=-(-setting.context // setting.block_size),
        tp=setting.tp,
        rounds=setting.quant == "int8_w8a8"
        or (setting.quant == "fp8" and setting.gpu.compute_capability >= FP8_CAPABILITY),
    )


def needed_blocks(setting: Setting) -> int:
    """Blocks with which `max_seqs` requests rarely wait for one another, the padding block included.

    One request needs its whole context. Of R requests at different points of different lengths, all are hardly ever
    long at once: what they hold has the mean ``R * mean_context`` and a spread that grows with the root of R, so
    ``R * mean + sqrt(R) * (context - mean)``. With `mean_context=context` that is R times the context. Half a block of
    each request but one is empty on average. Where all layers have a window, a request holds what is in sight.
    """
    count = setting.max_seqs
    longest = _held(setting, max(setting.max_num_batched_tokens, count))
    decoding = _held(setting, 1)
    mean = min(mean_tokens(setting), decoding)
    tokens = math.ceil(count * mean + math.sqrt(count) * (decoding - mean)) + longest - decoding
    return blocks_for(tokens, setting.block_size) + (count - 1) // 2


def _held(setting: Setting, chunk: int) -> int:
    return held_tokens(setting.model, setting.block_size, setting.context, chunk)


def mean_tokens(setting: Setting) -> int:
    """Tokens that a running request holds on average."""
    if setting.mean_context is None:
        return -(-setting.context // TYPICAL_SHARE)
    return min(setting.mean_context, setting.context)


def most_seqs(setting: Setting) -> MemoryPlan | None:
    """The plan with as many requests as fit, `setting.max_seqs` at most; None where not even one does."""
    best = memory_plan(replace(setting, max_seqs=1))
    if not best.fits:
        return None
    low, high = 1, setting.max_seqs
    while low < high:  # more requests need more blocks and leave room for fewer
        middle = (low + high + 1) // 2
        wider = replace(setting, max_seqs=middle)
        plan = MemoryPlan(wider, best.weights, _step(wider))
        if plan.fits:
            low, best = middle, plan
        else:
            high = middle - 1
    return best
