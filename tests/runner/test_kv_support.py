"""Cache dtypes and pools by GPU, without one."""

from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.config import KV_CACHE_DTYPES, CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from jaxinfer.models.config import ModelConfig
from jaxinfer.runner.kv_support import require_kv_dtype, slow_pool

A100, RTX4090, H200 = "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "NVIDIA H200"
LLAMA_8B = ModelConfig(128256, 4096, 14336, 32, 32, 8)


def on(kind: str) -> Any:
    device = AbstractDevice(device_kind=kind, num_cores=108, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("model",), abstract_device=device))


def test_e4m3_is_refused_before_ada_with_what_can_take_its_place() -> None:
    with (
        on(A100),
        pytest.raises(ValueError, match=r"fp8_e4m3.* 8\.9, and NVIDIA A100.* has 8\.0; use 'int8'.*'fp8_e5m2'"),
    ):
        require_kv_dtype("fp8_e4m3")


@pytest.mark.parametrize("kind", [A100, RTX4090, H200, None])
def test_everything_else_is_taken(kind: str | None) -> None:
    for dtype in KV_CACHE_DTYPES:
        if kind is None:
            require_kv_dtype(dtype)  # the CPU of this test
        elif (kind, dtype) != (A100, "fp8_e4m3"):
            with on(kind):
                require_kv_dtype(dtype)


def engine_config(dtype: str, layer_bytes: int) -> EngineConfig:
    """Pages of a layer, without scales, of so many bytes."""
    row = {"bfloat16": 256, "int8": 128, "fp8_e4m3": 128, "int4": 64}[dtype]
    cache = CacheConfig(16, layer_bytes // (16 * 16 * row), dtype)
    return EngineConfig(LLAMA_8B, cache, SchedulerConfig(), RunnerConfig("bfloat16"))


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "int4"])
def test_pools_that_the_kernels_cannot_address_are_told(dtype: str) -> None:
    gib = 2**30
    with on(H200):
        fits = engine_config(dtype, 2 * gib)
        assert slow_pool(fits) is None
        reason = str(slow_pool(engine_config(dtype, 3 * gib)))
        assert "between 2 and 4 GiB" in reason
        assert f"num_gpu_blocks_override={fits.cache.num_blocks - 1} the kernel" in reason
        assert "between 2 and 4 GiB" in str(slow_pool(engine_config(dtype, 4 * gib)))
        assert slow_pool(engine_config(dtype, 5 * gib)) is None
        assert slow_pool(engine_config("bfloat16", 3 * gib)) is None
    assert slow_pool(engine_config(dtype, 3 * gib)) is None  # on the CPU there are no kernels
