"""Products with packed weights, compiled to the end for GPUs that are not here: no copy of the weights, no spills."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.planning.deviceless import DevicelessReport, compile_for, gpu_target
from pallas_kernels.quantized_matmul import quantized_matmul


def compile_case(
    gpu: str,
    tokens: int,
    bits: int,
    group: int,
    *,
    kind: str = "offset",
    shape: tuple[int, int] = (14336, 4096),
    dtype: Any = jnp.bfloat16,
) -> DevicelessReport:
    rows, channels = shape
    groups = jax.ShapeDtypeStruct((rows, channels // group), jnp.float32)
    code_dtype = jnp.uint8 if bits == 4 else jnp.int8
    extra = {"offset": groups} if kind == "offset" else {}
    extra |= {"codebook": jax.ShapeDtypeStruct((16,), jnp.float32)} if kind == "table" else {}
    return compile_for(
        gpu_target(gpu),
        jax.jit(lambda x, codes, scale, extra: quantized_matmul(x, codes, scale, bits=bits, group=group, **extra)),
        jax.ShapeDtypeStruct((tokens, channels), dtype),
        jax.ShapeDtypeStruct((rows, channels * bits // 8), code_dtype),
        groups,
        extra,
    )


CASES = {
    "a100-80g": [(1, 4, 128, "offset"), (16, 4, 4096, "offset"), (64, 4, 64, "table"), (2048, 8, 32, "scale")],
    "rtx4090": [(8, 4, 64, "table"), (32, 8, 32, "scale"), (512, 4, 128, "offset"), (33, 8, 64, "offset")],
    "h100": [(16, 8, 32, "scale"), (32, 4, 128, "offset"), (64, 4, 32, "offset"), (4096, 4, 64, "table")],
    "h200": [(1, 4, 64, "table"), (16, 4, 128, "offset"), (64, 8, 128, "scale"), (4096, 4, 128, "offset")],
}
"""Tokens, bits, group, kind: every pair of two of these comes up on some GPU."""


@pytest.mark.parametrize("index", range(4))
def test_no_copy_and_no_spills(gpu: str, index: int) -> None:
    tokens, bits, group, kind = CASES[gpu][index]
    report = compile_case(gpu, tokens, bits, group, kind=kind)
    spec = gpu_target(gpu).spec
    kernel, *others = report.kernels
    assert kernel.name == "quantized_matmul"
    assert kernel.spill_bytes == 0
    # Programs that share an SM have enough loads in flight, and one of them decodes while another multiplies.
    assert 2 * kernel.shared_bytes <= spec.shared_memory_per_sm
    if tokens <= 64 or (spec.compute_capability >= (9, 0) and kind != "table"):
        assert 2 * kernel.registers * kernel.threads <= 65536
    assert len(report.launches) == 1 + len(others) <= 2
    assert report.temp_bytes <= 16 << 20
    if tokens > 64:
        assert not others and report.temp_bytes < 1024


def test_hopper_multiplies_weights_from_registers() -> None:
    """Its warps in groups of four: the other way takes more shared memory, and instructions of half the rate."""
    (kernel,) = compile_case("h200", 4096, 4, 128).kernels
    assert (kernel.threads, kernel.grid) == (256, (32 * 112, 1, 1))
    assert kernel.shared_bytes < 100_000


def test_narrow_weights_are_cut_into_pieces() -> None:
    """What would fill a fourth of the GPU has a program or more for each SM, and the sum is one launch."""
    report = compile_case("h200", 8, 4, 128, shape=(4096, 4096))
    kernel, total = report.kernels
    assert kernel.grid[0] * kernel.grid[1] >= gpu_target("h200").spec.num_sms
    assert total.launches == 1


@pytest.mark.parametrize(
    ("tokens", "bits", "group", "dtype"),
    [(16, 8, 4096, "bfloat16"), (64, 4, 128, "float16"), (16, 4, 128, "float32"), (16, 4, 16, "bfloat16")],
)
def test_other_cases_run_in_xla_without_a_copy(tokens: int, bits: int, group: int, dtype: str) -> None:
    report = compile_case("h200", tokens, bits, group, kind="scale", dtype=jnp.dtype(dtype))
    assert "quantized_matmul" not in [kernel.name for kernel in report.kernels]
    assert report.temp_bytes < 40 << 20


def test_float16_of_few_tokens_runs_in_the_kernel() -> None:
    for kind in ("offset", "table"):
        (kernel, *_) = compile_case("a100-80g", 16, 4, 64, kind=kind, dtype=jnp.float16).kernels
        assert kernel.name == "quantized_matmul"
        assert kernel.spill_bytes == 0
