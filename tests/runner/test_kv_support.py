"""Cache dtypes and pools by GPU, without one."""

from dataclasses import replace
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


def engine_config(dtype: str, layer_bytes: int, model: ModelConfig = LLAMA_8B) -> EngineConfig:
    """Pages of a layer, without scales, of so many bytes."""
    bits = {"bfloat16": 16, "int8": 8, "fp8_e4m3": 8, "int4": 4}[dtype]
    page = 16 * 2 * model.num_key_value_heads * model.head_dim * bits // 8
    return EngineConfig(model, CacheConfig(16, layer_bytes // page, dtype), SchedulerConfig(), RunnerConfig("bfloat16"))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "fp8_e4m3", "int4"])
@pytest.mark.parametrize("gib", [2, 3, 4, 5])
def test_the_kernel_writes_pools_of_every_size(dtype: str, gib: int) -> None:
    with on(H200):
        assert slow_pool(engine_config(dtype, gib << 30)) is None


@pytest.mark.parametrize(
    "model",
    [replace(LLAMA_8B, head_dim=66), replace(LLAMA_8B, rotary_dim=30), replace(LLAMA_8B, learned_positions=True)],
    ids=["odd halves", "odd halves of what is rotated", "learned positions"],
)
def test_pools_that_the_kernel_cannot_write_are_told(model: ModelConfig) -> None:
    """Bytes are counted in pairs from 2 to 4 GiB, and halves of an odd number of channels have none."""
    with on(H200):
        assert "between 2 and 4 GiB" in str(slow_pool(engine_config("int8", 3 << 30, model)))
        assert slow_pool(engine_config("int8", 5 << 30, model)) is None
        assert slow_pool(engine_config("bfloat16", 3 << 30, model)) is None
    assert slow_pool(engine_config("int8", 3 << 30, model)) is None  # on the CPU there are no kernels
