"""KV pool sizing: field case 25 with its numbers."""

import re

import pytest

from jaxinfer.config import KV_CACHE_DTYPES
from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.memory import (
    DeviceBudget,
    blocks_for,
    cpu_num_kv_blocks,
    held_tokens,
    kv_block_bytes,
    kv_token_bytes,
    num_kv_blocks,
    num_kv_blocks_in,
    num_kv_blocks_override,
    require_fraction,
)

GIB = 2**30
BLOCK = {"block_bytes": 2 * 2**20, "block_size": 16}


def budget(utilization, used=68, weights=9, activations=0.5, total=80):
    free = (total - used) * GIB
    return DeviceBudget(total * GIB, free, weights * GIB, int(activations * GIB), utilization)


def test_bytes_of_a_token():
    """SmolLM2-135M: 30 layers, 3 KV heads of 64; K and V in float32 are 46080 bytes a token."""
    config = ModelConfig(49152, 576, 1536, 30, 9, 3)
    assert kv_token_bytes(config, "float32") == 46080
    assert kv_token_bytes(config, "bfloat16") == 23040
    assert kv_block_bytes(config, 16, "float16") == 16 * 23040
    with pytest.raises(ValueError, match="dtype='int3'"):
        kv_token_bytes(config, "int3")


def test_bytes_of_a_quantised_token_count_its_scales():
    """Llama-3-8B: 32 layers, 8 KV heads of 128; 4 bytes of scale for each of 512 keys and values."""
    config = ModelConfig(128256, 4096, 14336, 32, 32, 8)
    sizes = {dtype: kv_token_bytes(config, dtype) for dtype in KV_CACHE_DTYPES}
    assert sizes["bfloat16"] == sizes["float16"] == 131072
    assert sizes["int8"] == sizes["fp8_e4m3"] == sizes["fp8_e5m2"] == 512 * (128 + 4)
    assert sizes["int4"] == 512 * (64 + 4)
    assert sizes["bfloat16"] / sizes["int8"] > 1.9
    assert sizes["bfloat16"] / sizes["int4"] > 3.6


@pytest.mark.parametrize(
    ("utilization", "used", "kv_gib"),
    [
        (0.2, 68, 2.5),  # 16 GiB is the share, 12 are free
        (0.9, 68, 2.5),  # 72 is the share, 12 are free
        (0.95, 68, 2.5),
        (0.2, 0, 6.5),  # alone on the device the share binds
        (0.2, 40, 6.5),  # what others use is not charged while the share is free: a second instance gets the same
        (0.9, 0, 62.5),
        (1.0, 0, 70.5),
        (0.1, 0, -1.5),
    ],
)
def test_budget_is_a_share_of_the_whole_device(utilization, used, kv_gib):
    assert budget(utilization, used).kv_bytes == pytest.approx(kv_gib * GIB, abs=1)


def test_blocks_fill_the_budget():
    blocks = num_kv_blocks(budget(0.9), **BLOCK, max_model_len=2048)
    assert blocks == 1280
    half = num_kv_blocks(budget(0.9), block_bytes=2**20, block_size=16, max_model_len=2048)
    assert half == 2 * blocks


def test_exactly_one_request_fits():
    """1280 blocks, one of them for padding: 1279 x 16 = 20464 tokens."""
    assert num_kv_blocks(budget(0.9), **BLOCK, max_model_len=20464) == 1280
    with pytest.raises(ValueError, match="max_model_len=20465"):
        num_kv_blocks(budget(0.9), **BLOCK, max_model_len=20465)


def test_remedies_work_when_the_fraction_binds():
    small = budget(0.2, used=0)
    with pytest.raises(ValueError) as caught:
        num_kv_blocks(small, **BLOCK, max_model_len=100_000)
    message = str(caught.value)
    for number in ("gpu_memory_utilization=0.2", "80.00 GiB", "9.00 GiB", "512.00 MiB", "6.50 GiB"):
        assert number in message
    fits = int(re.search(r"lower max_model_len to at most (\d+)", message)[1])
    assert num_kv_blocks(small, **BLOCK, max_model_len=fits)
    share = float(re.search(r"raise gpu_memory_utilization to at least ([\d.]+)", message)[1])
    assert num_kv_blocks(budget(share, used=0), **BLOCK, max_model_len=100_000)
    with pytest.raises(ValueError):
        num_kv_blocks(budget(share - 0.002, used=0), **BLOCK, max_model_len=100_000)
    explicit = int(re.search(r"set kv_cache_memory_bytes to at least (\d+)", message)[1])
    assert num_kv_blocks_in(explicit, **BLOCK, max_model_len=100_000) == blocks_for(100_000, 16)


def test_no_useless_remedy_when_free_memory_binds():
    with pytest.raises(ValueError) as caught:
        num_kv_blocks(budget(0.2), **BLOCK, max_model_len=100_000)
    message = str(caught.value)
    assert "raise gpu_memory_utilization" not in message and "kv_cache_memory_bytes" not in message
    need = blocks_for(100_000, 16) * BLOCK["block_bytes"] + int(9.5 * GIB) - 12 * GIB
    assert f"free {need / GIB:.2f} GiB that others use" in message
    assert "lower max_model_len to at most 20464" in message


def test_nothing_fits():
    for hopeless in (budget(0.1, used=0), budget(0.9, used=75)):
        assert hopeless.kv_bytes < 0
        with pytest.raises(ValueError, match="0 blocks") as caught:
            num_kv_blocks(hopeless, **BLOCK, max_model_len=64)
        assert "lower max_model_len" not in str(caught.value)


@pytest.mark.parametrize("value", [0, 0.0, 1.5, -0.1, float("nan"), 2])
def test_fraction_out_of_range(value):
    with pytest.raises(ValueError, match=f"gpu_memory_utilization={value}"):
        budget(value)


@pytest.mark.parametrize("value", ["0.9", None, True, [0.9]])
def test_fraction_of_the_wrong_type(value):
    with pytest.raises(TypeError, match="gpu_memory_utilization"):
        budget(value)


def test_fraction_bounds():
    assert require_fraction("gpu_memory_utilization", 1) == 1.0
    assert require_fraction("gpu_memory_utilization", 1e-3) == 1e-3


def test_explicit_bytes():
    assert num_kv_blocks_in(100 * BLOCK["block_bytes"] + 5, **BLOCK, max_model_len=99 * 16) == 100
    with pytest.raises(ValueError, match="kv_cache_memory_bytes=.*lower max_model_len to at most 1584|1584"):
        num_kv_blocks_in(100 * BLOCK["block_bytes"], **BLOCK, max_model_len=99 * 16 + 1)
    for bad in (0, -5):
        with pytest.raises(ValueError, match="kv_cache_memory_bytes"):
            num_kv_blocks_in(bad, **BLOCK, max_model_len=16)
    with pytest.raises(TypeError, match="kv_cache_memory_bytes"):
        num_kv_blocks_in(1e9, **BLOCK, max_model_len=16)


def test_explicit_blocks_are_usable_blocks():
    assert num_kv_blocks_override(8) == 9
    for bad in (0, -1):
        with pytest.raises(ValueError, match="num_gpu_blocks_override"):
            num_kv_blocks_override(bad)
    with pytest.raises(TypeError, match="num_gpu_blocks_override"):
        num_kv_blocks_override(8.0)


def test_cpu_pool_is_what_can_be_used_but_quick_to_start():
    roomy = budget(0.9, used=0, weights=1)
    sizes = BLOCK | {"max_model_len": 160}
    assert cpu_num_kv_blocks(roomy, **sizes, max_num_seqs=4) == 41
    assert cpu_num_kv_blocks(roomy, **sizes, max_num_seqs=10**6) == 10 * GIB // BLOCK["block_bytes"]
    tight = DeviceBudget(8 * GIB, 4 * GIB, 2 * GIB, 0, 0.9)
    one = BLOCK | {"max_model_len": 16 * 600}
    assert cpu_num_kv_blocks(tight, **one, max_num_seqs=8) == 601  # an eighth would be 256 blocks: too few for one
    with pytest.raises(ValueError, match="max_model_len"):
        cpu_num_kv_blocks(tight, **(BLOCK | {"max_model_len": 16 * 1024}), max_num_seqs=1)


def test_a_sliding_window_model_needs_its_window_and_a_chunk():
    """Mistral-7B v0.1 (window 4096) at 32k: a chunk of 2048 tokens sees 6143 positions, 385 blocks of 16 at worst."""
    shape = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 8}
    windowed = ModelConfig(**shape, sliding_window=4096)
    mixed = ModelConfig(**shape, sliding_window=4096, window_layers=(True, False) * 16)
    assert held_tokens(windowed, 16, 32768, 2048) == 385 * 16
    assert held_tokens(windowed, 16, 1000, 2048) == 1008  # shorter than the window
    assert held_tokens(mixed, 16, 32768, 2048) == 32768  # one full layer needs everything
    held = {"max_model_len": 32768, "held": 385 * 16}
    assert num_kv_blocks_in(386 * BLOCK["block_bytes"], **BLOCK, **held) == 386
    with pytest.raises(ValueError, match=r"max_model_len=32768 needs 386"):
        num_kv_blocks_in(385 * BLOCK["block_bytes"], **BLOCK, **held)
    assert num_kv_blocks(budget(0.2), **BLOCK, **held) == 1280  # 2.5 GiB, where 2049 would be too many
    with pytest.raises(ValueError, match=r"max_model_len to at most 20464"):
        num_kv_blocks(budget(0.2), **BLOCK, max_model_len=32768)
    roomy = budget(0.9, used=0)
    assert cpu_num_kv_blocks(roomy, **BLOCK, **held, max_num_seqs=4) == 4 * 385 + 1
