"""How large an engine gets on the CPU, without making one."""

from dataclasses import replace
from typing import Any

import pytest

from jaxinfer.cache.paged import kv_cache_bytes, kv_cache_shapes
from jaxinfer.config import EngineConfig
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.medusa import MedusaConfig
from jaxinfer.startup.args import EngineArgs
from jaxinfer.startup.medusa import Medusa
from jaxinfer.startup.sizing import engine_config

BLOCK_BYTES = 2 * 2 * 2 * 8 * 16 * 4  # layers, K and V, KV heads, head_dim, block_size, float32


def config(model: ModelConfig, **arguments: Any) -> EngineConfig:
    return engine_config(EngineArgs("m", **arguments), model, "float32", loaded=None)


def test_defaults(tiny_config: ModelConfig) -> None:
    made = config(tiny_config)
    scheduler = made.scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_model_len) == (32, 512, 512)
    assert scheduler.token_buckets[-1] == 512
    assert made.cache.num_blocks == 32 * 512 // 16 + 1  # all that can ever be used; memory is no limit here
    assert made.runner.compilation_cache_dir and made.runner.compilation_cache_dir.endswith("programs")


def test_what_is_given_bends_what_is_not(tiny_config: ModelConfig) -> None:
    assert config(tiny_config, max_num_batched_tokens=16).scheduler.max_num_seqs == 16
    assert config(tiny_config, max_num_seqs=1000).scheduler.max_num_batched_tokens == 1000
    with pytest.raises(ValueError, match="max_num_seqs=20 exceeds max_num_batched_tokens=16"):
        config(tiny_config, max_num_seqs=20, max_num_batched_tokens=16)


def test_pool_sizes(tiny_config: ModelConfig) -> None:
    assert config(tiny_config, num_gpu_blocks_override=8).cache.num_blocks == 9
    sized = config(tiny_config, kv_cache_memory_bytes=40 * BLOCK_BYTES)
    assert sized.cache.num_blocks == 40
    with pytest.raises(ValueError, match=r"kv_cache_memory_bytes=8192 .*max_model_len=512"):
        config(tiny_config, kv_cache_memory_bytes=8192)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization to at least"):
        config(tiny_config, gpu_memory_utilization=1e-9)


@pytest.mark.parametrize(("dtype", "row_bytes"), [("bfloat16", 16), ("int8", 8 + 4), ("fp8", 8 + 4), ("int4", 4 + 4)])
def test_a_pool_of_so_many_bytes_has_more_blocks_of_a_smaller_dtype(
    tiny_config: ModelConfig, dtype: str, row_bytes: int
) -> None:
    """A float32 row has 32 bytes; the codes' rows have a scale more."""
    sized = config(tiny_config, kv_cache_memory_bytes=40 * BLOCK_BYTES, kv_cache_dtype=dtype)
    assert sized.cache.num_blocks == 40 * 32 // row_bytes
    assert sized.kv_dtype == {"fp8": "fp8_e4m3"}.get(dtype, dtype) and sized.runner.dtype == "float32"


def test_what_guesses_needs_is_counted(tiny_config: ModelConfig) -> None:
    """Features in every block; weights and logits of the heads beside the model's."""
    guesser = Medusa(MedusaConfig(64, 256, 3, own_heads=True), None, None, 5, 3)
    size, block = 99 * BLOCK_BYTES, BLOCK_BYTES + 16 * 64 * 4
    args = EngineArgs("m", kv_cache_memory_bytes=size, speculative_config={"method": "medusa", "model": "x"})
    made = engine_config(args, tiny_config, "float32", loaded=None, guesser=guesser)
    assert made.cache.num_blocks == size // block < 99
    shapes = kv_cache_shapes(made.model, made.cache.num_blocks, 16, made.kv_dtype, made.features)
    assert size - block < kv_cache_bytes(shapes) <= size
    assert guesser.weight_bytes("float32") == 3 * 4 * (64 * 64 + 64 + 256 * 64)
    assert guesser.step_bytes(256, 8, 5) == 2 * 4 * 8 * 3 * 256


def test_max_model_len(tiny_config: ModelConfig) -> None:
    assert config(tiny_config, max_model_len=100).scheduler.max_model_len == 100
    with pytest.raises(ValueError, match="max_model_len=513 exceeds the 512 positions"):
        config(tiny_config, max_model_len=513)


def test_compilation_cache_dir(tiny_config: ModelConfig) -> None:
    assert config(tiny_config, compilation_cache_dir=False).runner.compilation_cache_dir is None
    assert config(tiny_config, compilation_cache_dir="/x/y").runner.compilation_cache_dir == "/x/y"


def test_a_windowed_model_needs_its_window_and_a_chunk(tiny_config: ModelConfig) -> None:
    """512 positions are 32 blocks; a window of 64 with chunks of 32 sees 95 positions, 7 blocks at worst."""
    windowed = replace(tiny_config, sliding_window=64)
    sizes = {"max_num_batched_tokens": 32, "max_num_seqs": 4}
    assert config(tiny_config, **sizes).cache.num_blocks == 4 * 32 + 1
    assert config(windowed, **sizes).cache.num_blocks == 4 * 7 + 1
    assert config(replace(windowed, window_layers=(True, False)), **sizes).cache.num_blocks == 4 * 32 + 1
    assert config(windowed, **sizes, kv_cache_memory_bytes=8 * BLOCK_BYTES).cache.num_blocks == 8
    with pytest.raises(ValueError, match="max_model_len=512 needs 8, padding block included"):
        config(windowed, **sizes, kv_cache_memory_bytes=7 * BLOCK_BYTES)
