"""Norm, projections and gate, compiled to the end for GPUs that are not here: one launch, without spills."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.planning.deviceless import DevicelessReport, compile_for, gpu_target
from pallas_kernels.gated_matmul import norm_gated_matmul


def compile_case(gpu: str, tokens: int, activation: str = "silu", dtype: str = "bfloat16") -> DevicelessReport:
    function = partial(norm_gated_matmul, epsilon=1e-5, activation=activation)
    shapes = ((tokens, 4096), (4096,), (2, 14336, 4096))
    return compile_for(gpu_target(gpu), jax.jit(function), *(jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in shapes))


@pytest.mark.parametrize("tokens", [1, 32, 64])
def test_one_launch_that_fits(gpu: str, tokens: int) -> None:
    report = compile_case(gpu, tokens)
    (kernel,) = report.kernels
    assert [launch.name for launch in report.launches] == ["norm_gated_matmul"]
    assert kernel.spill_bytes == 0
    # Two programs a multiprocessor at least, to have enough loads in flight.
    assert 2 * kernel.shared_bytes <= gpu_target(gpu).spec.shared_memory_per_sm
    assert 2 * kernel.registers * kernel.threads <= 65536
    assert report.temp_bytes < 1024


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_other_activations(activation: str) -> None:
    (kernel,) = compile_case("h200", 16, activation).kernels
    assert kernel.name == "norm_gated_matmul"
    assert kernel.spill_bytes == 0


@pytest.mark.parametrize(
    ("tokens", "activation", "dtype"), [(128, "silu", "bfloat16"), (8, "silu", "float16"), (8, "gelu", "bfloat16")]
)
def test_other_cases_run_in_xla(tokens: int, activation: str, dtype: str) -> None:
    report = compile_case("h200", tokens, activation, dtype)
    assert "norm_gated_matmul" not in [kernel.name for kernel in report.kernels]
