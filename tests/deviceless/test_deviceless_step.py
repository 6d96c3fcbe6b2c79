"""The engine's step program, compiled for GPUs that are not here.

Every layer is the same program again, so that four of them show what there is to see; one test compiles a whole model.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import pytest

from jaxinfer.config import FeatureSpec
from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.deviceless import gpu_target
from jaxinfer.planning.launch_table import launch_table
from jaxinfer.runner.deviceless_step import DevicelessStep, compile_step
from jaxinfer.runner.inputs import StepSpec

MIB = 1 << 20
LLAMA_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=4,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_theta=5e5,
)
DECODE = StepSpec(num_tokens=32, num_rows=32, table_width=512, sampler=False)
CHUNK = replace(DECODE, num_tokens=512)
SAMPLED = replace(DECODE, sampler=True)
VERIFY = StepSpec(num_tokens=96, num_rows=16, table_width=512, sampler=False, num_logits=96)
"""16 requests with 5 guesses each."""
TINY = StepSpec(num_tokens=16, num_rows=8, table_width=8, sampler=False)

Compile = Callable[..., DevicelessStep]


@pytest.fixture(scope="module")
def step() -> Compile:
    """`step(gpu, num_devices, spec, num_layers)`: the step of the 8B shapes, compiled once for each."""

    def compile_8b(gpu: str, num_devices: int = 1, spec: StepSpec = DECODE, num_layers: int = 4) -> DevicelessStep:
        config = replace(LLAMA_8B, num_hidden_layers=num_layers)
        return compile_step(gpu_target(gpu, num_devices), config, spec)

    return cache(compile_8b)


def assert_in_place(step: DevicelessStep) -> None:
    """The pool is updated where it is, and nothing as large as a weight or a pool is made."""
    assert step.report.copies_of((step.params, step.kv)) == ()
    assert step.report.alias_bytes == step.donated_bytes


@pytest.mark.parametrize("num_devices", [1, 2])
def test_decode_copies_nothing(step: Compile, gpu: str, num_devices: int) -> None:
    decode = step(gpu, num_devices)
    assert_in_place(decode)
    assert decode.report.temp_bytes < 32 * MIB


def test_decode_is_one_graph(step: Compile, gpu: str) -> None:
    report = step(gpu).report
    assert report.launches_outside_graphs() == ()
    assert report.num_command_buffers == 1


def test_decode_on_two_devices_is_a_graph_between_collectives(step: Compile, gpu: str) -> None:
    report = step(gpu, 2).report
    outside = report.launches_outside_graphs()
    assert {launch.kind for launch in outside} == {"AllReduce"}
    assert len(outside) == 2 * LLAMA_8B.num_hidden_layers + 2  # and those of embedding and head
    assert report.num_command_buffers <= len(outside) + 2


# On two devices: the two all-reduces, and the residuals, which a product can add no longer.
@pytest.mark.parametrize(("num_devices", "limit"), [(1, 8), (2, 12)])
def test_decode_launches_few_kernels_a_layer(step: Compile, gpu: str, num_devices: int, limit: int) -> None:
    decode = step(gpu, num_devices)
    _, *layers = decode.layers()
    print(f"\n{gpu}, {num_devices} devices: {len(layers[-1])} launches a layer")
    print(launch_table(layers[-1], decode.report.kernels))
    assert len(layers) == 2
    assert max(map(len, layers)) <= limit


def test_decode_attends_with_our_kernels(step: Compile, gpu: str) -> None:
    decode = step(gpu)
    names = [launch.name for launch in decode.report.launches]
    for kernel in ("rope_kv_write", "paged_attention_short", "norm_gated_matmul"):
        assert names.count(kernel) == LLAMA_8B.num_hidden_layers
    limit = gpu_target(gpu).spec.shared_memory_per_block
    for kernel in decode.report.kernels:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.shared_bytes <= limit, kernel


@pytest.mark.parametrize("spec", [CHUNK, SAMPLED], ids=["chunk", "sampled"])
def test_other_steps_copy_nothing(step: Compile, spec: StepSpec) -> None:
    other = step("h200", 1, spec, 2)
    assert_in_place(other)
    logits_bytes = 4 * spec.num_rows * LLAMA_8B.vocab_size
    ffn_bytes = 2 * spec.num_tokens * 2 * LLAMA_8B.intermediate_size  # gate and up, bfloat16
    assert other.report.temp_bytes < (8 if spec.sampler else 1) * logits_bytes + 2 * ffn_bytes


@pytest.mark.parametrize("tree_width", [0, 6], ids=["chains", "trees"])
def test_verification_is_one_graph_and_copies_nothing(step: Compile, gpu: str, tree_width: int) -> None:
    verify = step(gpu, 1, replace(VERIFY, tree_width=tree_width), 2)
    assert_in_place(verify)
    assert verify.report.launches_outside_graphs() == () and verify.report.num_command_buffers == 1
    limit = gpu_target(gpu).spec.shared_memory_per_block
    for kernel in verify.report.kernels:
        assert kernel.spill_bytes == 0 and kernel.shared_bytes <= limit, kernel


def test_a_prefill_chunk_is_one_graph(step: Compile) -> None:
    report = step("h200", 1, CHUNK, 2).report
    assert report.launches_outside_graphs() == ()
    assert report.num_command_buffers == 1


def test_a_whole_8b_model(step: Compile) -> None:
    decode = step("h200", num_layers=32)
    assert_in_place(decode)
    assert decode.report.num_command_buffers == 1
    assert decode.report.argument_bytes >= decode.param_bytes == 16_060_522_496
    shallow = step("h200")
    assert decode.report.temp_bytes <= 1.1 * shallow.report.temp_bytes
    assert {len(layer) for layer in decode.layers()[1:]} == {len(layer) for layer in shallow.layers()[1:]}


def test_a_pool_that_fills_the_gpu_changes_nothing(step: Compile) -> None:
    target = gpu_target("rtx4090")
    page_bytes = 16 * 2 * 2 * LLAMA_8B.num_key_value_heads * LLAMA_8B.head_dim * LLAMA_8B.num_hidden_layers
    pages = int(0.85 * target.spec.memory_bytes / page_bytes)
    full = compile_step(target, LLAMA_8B, DECODE, num_pages=pages)
    assert full.report.argument_bytes > 0.95 * target.spec.memory_bytes
    assert len(full.report.launches) == len(step("rtx4090").report.launches)


# Spread int4 channels take a launch for RoPE, which the kernel does otherwise, and two products with Hadamard's matrix.
@pytest.mark.parametrize(("kv_dtype", "more_a_layer"), [("int8", 0), ("fp8_e4m3", 0), ("int4", 3)])
def test_a_quantised_cache_costs_no_memory_and_few_launches(step: Compile, kv_dtype: str, more_a_layer: int) -> None:
    plain = step("h200", num_layers=2)
    config = replace(LLAMA_8B, num_hidden_layers=2)
    # So many pages that no array of scales has the size of a product's workspace.
    coded = compile_step(gpu_target("h200"), config, DECODE, num_pages=5000, kv_dtype=kv_dtype)
    assert_in_place(coded)
    assert coded.report.temp_bytes <= 1.01 * plain.report.temp_bytes
    assert len(coded.report.launches) <= len(plain.report.launches) + 2 * more_a_layer + (2 if more_a_layer else 0)
    assert coded.report.num_command_buffers == 1 and coded.report.launches_outside_graphs() == ()
    names = [launch.name for launch in coded.report.launches]
    assert names.count("rope_kv_write") == names.count("paged_attention_short") == 2
    assert {kernel.spill_bytes for kernel in coded.report.kernels} == {0}


@pytest.mark.parametrize("num_devices", [1, 2])
def test_features_are_kept_in_place_by_one_launch(step: Compile, num_devices: int) -> None:
    plain = step("h200", num_devices, num_layers=2)
    config = replace(LLAMA_8B, num_hidden_layers=2)
    spec = FeatureSpec("hidden", LLAMA_8B.hidden_size, "bfloat16")
    kept = compile_step(gpu_target("h200", num_devices), config, DECODE, features=spec)
    assert_in_place(kept)
    hidden = DECODE.num_tokens * LLAMA_8B.hidden_size * 2  # all rows' are there until both have been made of them
    assert kept.report.temp_bytes <= plain.report.temp_bytes + hidden + 1024
    assert len(kept.report.launches) == len(plain.report.launches) + 1
    # Of several devices the last all-reduce divides what is written at the end.
    assert kept.report.num_command_buffers <= plain.report.num_command_buffers + (num_devices > 1)
    assert kept.report.launches_outside_graphs() == plain.report.launches_outside_graphs()


def test_a_pool_of_bytes_that_are_addressed_in_pairs_changes_nothing(step: Compile) -> None:
    """3 GiB a layer: what an 8B model has on an H200 that it fills."""
    config = replace(LLAMA_8B, num_hidden_layers=2)
    pages = (3 << 30) // (16 * 16 * LLAMA_8B.head_dim)
    large = compile_step(gpu_target("h200"), config, DECODE, num_pages=pages, kv_dtype="int8")
    assert_in_place(large)
    plain = step("h200", num_layers=2)
    assert large.report.temp_bytes <= 1.01 * plain.report.temp_bytes
    assert [launch.name for launch in large.report.launches] == [launch.name for launch in plain.report.launches]


def test_tiny_step_compiles_for_every_gpu(gpu: str, tiny_config: ModelConfig) -> None:
    tiny = compile_step(gpu_target(gpu), tiny_config, TINY, num_pages=64, dtype=jnp.float32)
    assert tiny.report.alias_bytes == tiny.donated_bytes
    assert tiny.report.temp_bytes < 8 * MIB


def test_a_model_that_does_not_split_is_refused(tiny_config: ModelConfig) -> None:
    config = replace(tiny_config, num_attention_heads=3, num_key_value_heads=3, head_dim=16)
    with pytest.raises(ValueError, match="num_attention_heads=3 evenly; use one of 1, 3$"):
        compile_step(gpu_target("h200", 2), config, TINY)
