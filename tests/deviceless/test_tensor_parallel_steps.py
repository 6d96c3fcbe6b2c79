"""A decode step of Llama-3-70B's shapes over several GPUs that are not here: what goes between them, and what fits.

Every layer is the same program again, so that two of them show what there is to see; `scripts/tensor_parallel_plan.py`
compiles all 80.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import pytest

from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.deviceless import gpu_target
from jaxinfer.quant.plan import QuantPlan
from jaxinfer.runner.deviceless_step import DevicelessStep, compile_step
from jaxinfer.runner.inputs import StepSpec

MIB = 1 << 20
LLAMA_70B = ModelConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=2,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_theta=5e5,
)
DECODE = StepSpec(num_tokens=64, num_rows=64, table_width=512, sampler=False)
LAYERS_OF_70B = 80

Compile = Callable[..., DevicelessStep]


@pytest.fixture(scope="module")
def step() -> Compile:
    """`step(gpu, num_devices)`: the step, compiled once for each."""
    return cache(lambda gpu, num_devices: compile_step(gpu_target(gpu, num_devices), LLAMA_70B, DECODE))


def collectives(step: DevicelessStep) -> Counter[str]:
    """Kinds of launches that are no kernels, no products and no copies within a GPU."""
    ours = {"CustomKernel", "Kernel", "CublasLtMatmul", "Gemm", "Copy", "PartitionId", "ReplicaId", "Memset"}
    return Counter(launch.kind for launch in step.report.launches if launch.kind not in ours)


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize("gpu", ["h200", "a100-80g"])
def test_two_all_reduces_a_layer_and_those_of_embedding_and_head(step: Compile, gpu: str, num_devices: int) -> None:
    decode = step(gpu, num_devices)
    assert collectives(decode) == {"AllReduce": 2 * LLAMA_70B.num_hidden_layers + 2}
    assert decode.report.copies_of((decode.shards.part_shapes(decode.params), decode.kv)) == ()
    assert decode.report.alias_bytes == decode.donated_bytes
    assert decode.report.temp_bytes < 64 * MIB


@pytest.mark.parametrize(
    ("gpu", "num_devices"), [("h200", 2), ("h200", 4), ("h200", 8), ("a100-80g", 4), ("a100-80g", 8)]
)
def test_all_layers_fit(step: Compile, gpu: str, num_devices: int) -> None:
    """Weights and scratch memory of all 80 layers leave room for the KV cache of a batch of 64 with 1000 tokens each.
    On two A100s they do not fit: 131 GiB of weights into 149 GiB leave less than 2 GiB a GPU beside what XLA needs."""
    decode, spec = step(gpu, num_devices), gpu_target(gpu).spec
    a_layer = (step(gpu, num_devices).param_bytes - _ends(num_devices)) / LLAMA_70B.num_hidden_layers
    weights = a_layer * LAYERS_OF_70B + _ends(num_devices)
    cache_bytes = 64 * 1000 * LAYERS_OF_70B * 2 * 2 * 8 * 128 // num_devices
    total = weights + cache_bytes + decode.report.temp_bytes
    print(f"\n{gpu} x {num_devices}: weights {weights / 2**30:.1f} GiB, temp {decode.report.temp_bytes / MIB:.1f} MiB")
    assert total < 0.92 * spec.memory_bytes


def _ends(num_devices: int) -> int:
    """Embedding and head, and the norm before it."""
    return 2 * 2 * 128256 * 8192 // num_devices + 2 * 8192


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_quantised_weights_stay_where_they_are(method: str) -> None:
    config = replace(LLAMA_70B, num_hidden_layers=1)
    decode = compile_step(gpu_target("h200", 4), config, DECODE, plan=QuantPlan(method))  # type: ignore[arg-type]
    assert collectives(decode) == {"AllReduce": 4}
    assert decode.report.temp_bytes < 64 * MIB


def test_experts_are_added_up_once() -> None:
    config = replace(
        LLAMA_70B,
        num_hidden_layers=1,
        hidden_size=2048,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
    )
    for splits_experts in (False, True):
        decode = compile_step(gpu_target("h200", 4), config, DECODE, dtype=jnp.bfloat16, splits_experts=splits_experts)
        assert collectives(decode) == {"AllReduce": 4}
