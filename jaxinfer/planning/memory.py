"""How many KV blocks fit into the budget of a device. HOST only, never imports jax."""

import math
from dataclasses import dataclass

from jaxinfer.cache.sight import BlockSight
from jaxinfer.config import FeatureSpec, require_positive
from jaxinfer.models.config import ModelConfig

KV_CHANNEL_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "fp8_e4m3": 8, "fp8_e5m2": 8, "int4": 4}
"""What a channel of a key or value takes in each of `jaxinfer.config.KV_CACHE_DTYPES`."""
SCALE_BYTES = 4
"""Of the scale that codes have for each token and head, in a cache of 8 bits or less."""
CPU_POOL_SHARE = 8
"""By default the pool on the CPU takes at most one part in this many of the available memory, to start quickly."""


def kv_row_bytes(head_dim: int, dtype: str) -> int:
    """Bytes of one key, or one value, of one token and head; the scale of codes included.

    Raises:
        ValueError: `dtype` is not a KV cache dtype.
    """
    if dtype not in KV_CHANNEL_BITS:
        raise ValueError(f"dtype={dtype!r} is not a KV cache dtype; use one of {', '.join(KV_CHANNEL_BITS)}")
    bits = KV_CHANNEL_BITS[dtype]
    return bits * head_dim // 8 + (SCALE_BYTES if bits <= 8 else 0)


def kv_token_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes of the keys and values of one token in all layers, scales included.

    Raises:
        ValueError: as `kv_row_bytes`.
    """
    return model.num_hidden_layers * 2 * model.num_key_value_heads * kv_row_bytes(model.head_dim, dtype)


def kv_block_bytes(model: ModelConfig, block_size: int, dtype: str, features: FeatureSpec | None = None) -> int:
    """Bytes of one block of `block_size` tokens in all layers, scales and what else is kept of tokens included."""
    own = block_size * kv_token_bytes(model, dtype)
    if features is None:
        return own
    layer = 0 if features.layer is None else block_size * kv_token_bytes(features.layer, dtype)
    return own + layer + features.block_bytes(block_size)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks of a pool that holds `num_tokens` tokens of one request; the padding block counts as one."""
    return -(-num_tokens // block_size) + 1


def held_tokens(model: ModelConfig, block_size: int, num_tokens: int, chunk: int) -> int:
    """Slots of the pool that a request of `num_tokens` tokens takes at the same time, at most: all of them, or, where
    every layer has a window, those that a step of `chunk` tokens still sees or writes."""
    return BlockSight(block_size, model.widest_window).most_blocks(num_tokens, chunk) * block_size


def require_fraction(name: str, value: object) -> float:
    """`value` as a float in (0, 1].

    Raises:
        TypeError: not a number.
        ValueError: out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} must be a number above 0 and at most 1, such as 0.9")
    if not 0 < value <= 1:
        raise ValueError(f"{name}={value} must be above 0 and at most 1: it is this engine's share of the whole device")
    return float(value)


@dataclass(frozen=True)
class DeviceBudget:
    """What one engine may use of one device. All sizes are bytes on that device.

    The KV cache gets `min(utilization * total, free) - weights - activations`: `utilization` is this engine's share of
    the whole device, whatever others use, and what others hold only matters once less than that share is free.

    Args:
        total_bytes: memory of the device.
        free_bytes: free memory BEFORE this engine's weights are loaded. When it is measured afterwards, add
            `weight_bytes` back, or the weights would be subtracted twice.
        weight_bytes: parameters of the model.
        activation_bytes: what the largest step needs besides weights and KV cache, sampler state included.
        utilization: `gpu_memory_utilization`, above 0 and at most 1.

    Raises:
        TypeError, ValueError: `utilization` is not such a number.
    """

    total_bytes: int
    free_bytes: int
    weight_bytes: int
    activation_bytes: int
    utilization: float

    def __post_init__(self) -> None:
        require_fraction("gpu_memory_utilization", self.utilization)

    @property
    def kv_bytes(self) -> int:
        """What is left for the KV cache; negative when not even the weights fit."""
        usable = min(int(self.utilization * self.total_bytes), self.free_bytes)
        return usable - self.weight_bytes - self.activation_bytes


def num_kv_blocks(
    budget: DeviceBudget, *, block_bytes: int, block_size: int, max_model_len: int, held: int | None = None
) -> int:
    """Blocks of the largest pool within the budget, the padding block included.

    Args:
        budget: of the device.
        block_bytes: of one block in all layers (`kv_block_bytes`).
        block_size: tokens in a block.
        max_model_len: longest request, in tokens; one such must fit.
        held: slots that such a request takes at the same time (`held_tokens`); None for `max_model_len`.

    Raises:
        ValueError: one request of `max_model_len` tokens does not fit, with the numbers and what would help.
    """
    blocks = max(budget.kv_bytes // block_bytes, 0)
    needed = blocks_for(held or max_model_len, block_size)
    if blocks < needed:
        raise ValueError(_too_small(budget, blocks, needed, block_bytes, block_size, max_model_len))
    return blocks


def num_kv_blocks_in(
    kv_cache_memory_bytes: int, *, block_bytes: int, block_size: int, max_model_len: int, held: int | None = None
) -> int:
    """Blocks of a pool of the given size, which overrides the budget; the padding block included.

    Raises:
        TypeError: `kv_cache_memory_bytes` is not an int.
        ValueError: one request of `max_model_len` tokens does not fit.
    """
    require_positive("kv_cache_memory_bytes", kv_cache_memory_bytes)
    blocks = kv_cache_memory_bytes // block_bytes
    needed = blocks_for(held or max_model_len, block_size)
    if blocks < needed:
        remedies = [f"raise kv_cache_memory_bytes to at least {needed * block_bytes}"]
        remedies += _shorter(blocks, block_size)
        raise ValueError(
            f"kv_cache_memory_bytes={kv_cache_memory_bytes} is {blocks} KV blocks of {block_bytes} bytes, but one "
            f"request of max_model_len={max_model_len} needs {needed}, padding block included; {' or '.join(remedies)}"
        )
    return blocks


def num_kv_blocks_override(num_blocks: int) -> int:
    """Blocks of a pool in which `num_blocks` (`num_gpu_blocks_override`) can be allocated: one more, for padding.

    The caller has chosen, so `max_model_len` is not checked against it: requests that cannot fit are refused one by
    one, and one that fills the pool ends with "length".

    Raises:
        TypeError, ValueError: not an int of at least 1.
    """
    require_positive("num_gpu_blocks_override", num_blocks)
    return num_blocks + 1


def cpu_num_kv_blocks(
    budget: DeviceBudget,
    *,
    block_bytes: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    held: int | None = None,
) -> int:
    """Blocks of the default pool on the CPU.

    The pool is zeroed at start, so it takes no more than the budget allows, than `max_num_seqs` requests of
    `max_model_len` tokens can fill, and than an eighth of the available memory; but always enough for one request
    of `max_model_len` tokens. Ask for more with kv_cache_memory_bytes or num_gpu_blocks_override.

    Args:
        budget: made of `host_memory()`'s total and available bytes.
        block_bytes, block_size, max_model_len, held: as in `num_kv_blocks`.
        max_num_seqs: requests that may run at once.

    Raises:
        ValueError: as in `num_kv_blocks`.
    """
    affordable = num_kv_blocks(
        budget, block_bytes=block_bytes, block_size=block_size, max_model_len=max_model_len, held=held
    )
    one = blocks_for(held or max_model_len, block_size)
    useful = max_num_seqs * (one - 1) + 1
    quick = budget.free_bytes // CPU_POOL_SHARE // block_bytes
    return max(one, min(affordable, useful, quick))


def _too_small(
    budget: DeviceBudget, blocks: int, needed: int, block_bytes: int, block_size: int, max_model_len: int
) -> str:
    need_bytes = needed * block_bytes
    whole = need_bytes + budget.weight_bytes + budget.activation_bytes
    remedies = _shorter(blocks, block_size)
    if whole <= budget.free_bytes:
        share = math.ceil(whole / budget.total_bytes * 1000) / 1000
        remedies.append(f"raise gpu_memory_utilization to at least {share:g}")
        remedies.append(f"set kv_cache_memory_bytes to at least {need_bytes}")
    else:
        remedies.append(f"free {_size(whole - budget.free_bytes)} that others use, or use a device with more memory")
    return (
        f"the KV cache would have {_size(max(budget.kv_bytes, 0))} ({blocks} blocks of {block_bytes} bytes), but one "
        f"request of max_model_len={max_model_len} needs {_size(need_bytes)} ({needed} blocks, padding included). "
        f"gpu_memory_utilization={budget.utilization:g} of {_size(budget.total_bytes)} with "
        f"{_size(budget.free_bytes)} free, less weights of {_size(budget.weight_bytes)} and "
        f"{_size(budget.activation_bytes)} for the largest step. Remedy: {'; or '.join(remedies)}"
    )


def _shorter(blocks: int, block_size: int) -> list[str]:
    fits = (blocks - 1) * block_size
    return [f"lower max_model_len to at most {fits}"] if fits > 0 else []


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} bytes"
