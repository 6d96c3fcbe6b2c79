"""Where a card's memory goes, by hand: field case 25's card, with an int8 cache, on two cards, and with a window."""

from dataclasses import replace

import pytest

from jaxinfer.planning import PRESETS
from jaxinfer.planning.gpu_specs import GPU_SPECS
from jaxinfer.planning.memory_plan import MemoryPlan, Setting, memory_plan

GIB = 2**30
CARD = replace(GPU_SPECS["a100-80g"], memory_bytes=80 * GIB)
SETTING = Setting(PRESETS["llama-3-8b"], CARD, context=8192, max_seqs=8)
WEIGHTS = 2 * 8_030_261_248


def blocks(plan: MemoryPlan, token_bytes: int) -> int:
    """What is left for the cache, in blocks of 16 tokens."""
    left = int(plan.setting.utilization * 80 * GIB) - plan.weights - plan.step.total
    return max(left // (16 * token_bytes), 0)


@pytest.mark.parametrize("utilization", [0.2, 0.9, 0.95])
@pytest.mark.parametrize(("kv_dtype", "token_bytes"), [("auto", 131_072), ("int8", 67_584), ("int4", 34_816)])
def test_the_cache_takes_what_is_left(utilization: float, kv_dtype: str, token_bytes: int) -> None:
    plan = memory_plan(replace(SETTING, utilization=utilization, kv_dtype=kv_dtype))
    assert plan.weights == WEIGHTS and plan.budget == int(utilization * 80 * GIB)
    assert plan.num_blocks == blocks(plan, token_bytes)
    # 8 requests of up to 8,192 tokens: 8 x 2,731 + sqrt(8) x 5,461 in blocks, three half ones, and that for padding.
    assert plan.fits == (plan.num_blocks >= -(-37_295 // 16) + 3 + 1) == (utilization > 0.2)
    assert plan.total <= plan.budget < plan.total + 16 * token_bytes
    assert plan.kv_tokens == max(plan.num_blocks - 1, 0) * 16


def test_two_cards_share_the_layers() -> None:
    """The norms lie whole on both."""
    plan = memory_plan(replace(SETTING, tp=2))
    whole = 2 * 65 * 4096
    assert plan.weights == whole + (WEIGHTS - whole) // 2
    assert plan.num_blocks == blocks(plan, 131_072 // 2)


def test_nothing_left_is_nothing() -> None:
    plan = memory_plan(replace(SETTING, utilization=0.1))
    assert plan.num_blocks == plan.kv_cache == plan.kv_tokens == 0 and not plan.fits


def test_memory_over_the_context() -> None:
    """8 requests of up to 3,072 tokens at once: 8 x 1,024 + sqrt(8) x 2,048 tokens in blocks, three half ones."""
    plan = memory_plan(SETTING)
    needed = -(-(8 * 1024 + 5793) // 16) + 1 + 3
    assert plan.with_context(3072) == plan.weights + plan.step.total + needed * 16 * 131_072
