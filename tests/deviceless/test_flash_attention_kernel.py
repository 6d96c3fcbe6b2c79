"""Flash attention, forward and backward, compiled to the end for GPUs that are not here."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.planning.deviceless import DevicelessReport, compile_for, gpu_target
from jaxinfer.planning.kernel_resources import KernelResources
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.flash_attention.cases import CASES, FlashCase

MIB = 1 << 20
KERNELS = ["flash_attention_forward", "flash_attention_dq", "flash_attention_dkv"]
EACH_GPU = [
    "llama-3-8b 4k",
    "gemma-2-2b 8k",
    "qwen2.5-0.5b packed",
    "phi-2 chunk",
    "encoder, ragged",
    "window, ragged",
    "float32",
]


def compile_gradients(gpu: str, case: FlashCase, implementation: str | None = None) -> DevicelessReport:
    """Forward and backward pass in one program, by the implementation that dispatch chooses."""
    operands = case.abstract_operands()
    q = operands["q"]

    def gradients(arrays: Any, masks: Any, grads: Any) -> Any:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            options = {**masks, **case.options, "implementation": implementation}
            return flash_attention(q, k, v, return_lse=True, **options)

        results, pullback = jax.vjp(attend, *arrays)
        return results, pullback(grads)

    lse = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    masks = {name: operands.pop(name) for name in ("segment_ids", "kv_lengths")}
    return compile_for(gpu_target(gpu), jax.jit(gradients), tuple(operands.values()), masks, (q, lse))


def ours(report: DevicelessReport) -> list[KernelResources]:
    return [kernel for kernel in report.kernels if kernel.name.startswith("flash_attention")]


def assert_fits(report: DevicelessReport, gpu: str) -> None:
    kernels = ours(report)
    for kernel in kernels:
        print(
            f"{gpu:9}{kernel.name:24}{kernel.registers:4} registers, {kernel.spill_bytes} bytes spilled, "
            f"{kernel.shared_bytes} bytes shared, {kernel.threads} threads, temp {report.temp_bytes / MIB:.1f} MiB"
        )
    assert sorted(kernel.name for kernel in kernels) == sorted(KERNELS)
    assert all(kernel.spill_bytes == 0 for kernel in kernels)
    assert all(kernel.shared_bytes <= gpu_target(gpu).spec.shared_memory_per_block for kernel in kernels)


@pytest.mark.parametrize("name", EACH_GPU)
def test_forward_and_backward_are_three_kernels(gpu: str, name: str) -> None:
    if gpu == "h100" and name != EACH_GPU[0]:
        pytest.skip("the same kernels as for the H200")
    case = CASES[name]
    report = compile_gradients(gpu, case)
    assert_fits(report, gpu)
    # delta, one float for each query and head, is all that lives between the passes but their results.
    rows = 4 * case.batch * case.num_heads * case.num_queries
    assert report.temp_bytes <= 2 * rows + 4096
    assert report.num_command_buffers == 1
    assert not report.launches_outside_graphs()


def test_forward_alone_is_one_launch(gpu: str) -> None:
    case = CASES["llama-3-8b 4k"]
    operands = case.abstract_operands()
    function = jax.jit(lambda q, k, v: flash_attention(q, k, v, **case.options))
    report = compile_for(gpu_target(gpu), function, operands["q"], operands["k"], operands["v"])
    assert [launch.name for launch in report.launches] == KERNELS[:1]
    assert report.temp_bytes < 1024


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_memory_grows_with_the_tokens(implementation: str | None) -> None:
    """Not with their square: from 4k to 8k it doubles, where the logits of 4k alone would be 2 GiB."""
    small, large = (
        compile_gradients("h200", FlashCase(length, length), implementation).temp_bytes for length in (4096, 8192)
    )
    assert large <= 2.1 * small
    # XLA transposes q and the gradient, and sums dk and dv in float32; q has 64 MiB.
    assert large < 6 * 64 * MIB


@pytest.mark.parametrize(
    "case", [CASES["multi-query, one token"], FlashCase(10, 20, 2, 2, 16)], ids=["one query", "smaller than all tiles"]
)
@pytest.mark.parametrize("target", ["a100-80g", "rtx4090", "h200"])
def test_tiles_shrink_to_what_there_is(target: str, case: FlashCase) -> None:
    assert_fits(compile_gradients(target, case), target)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_float32_fits_the_smallest_shared_memory(head_dim: int) -> None:
    report = compile_gradients("rtx4090", FlashCase(1000, 1000, 8, 4, head_dim, dtype="float32"))
    limit = gpu_target("rtx4090").spec.shared_memory_per_block
    assert sorted(kernel.name for kernel in ours(report) if kernel.shared_bytes <= limit) == sorted(KERNELS)


def test_heads_that_are_too_wide_fall_back() -> None:
    report = compile_gradients("h200", FlashCase(512, 512, 4, 4, 320))
    assert not ours(report)
