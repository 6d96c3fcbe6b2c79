"""Registers, spills and shared memory of kernels compiled for GPUs that are not here."""

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxinfer.planning.deviceless import DevicelessReport, compile_for, gpu_target

FAIL_ON_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


def powers(size: int, num_warps: int) -> Callable[[jax.Array], jax.Array]:
    """A chain of products of one tile with itself, and a column sum by XLA; more registers for fewer warps."""

    def kernel(x_ref: jax.Array, out_ref: jax.Array) -> None:
        x = x_ref[...]
        out_ref[...] = jax.lax.fori_loop(0, 16, lambda _, y: (y @ x).astype(x.dtype), x)

    def function(x: jax.Array) -> jax.Array:
        call = pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
            name="powers",
        )
        return jnp.sum(call(x).astype(jnp.float32), axis=0)

    return function


def compile_powers(gpu: str, size: int, num_warps: int, options: dict[str, bool] | None = None) -> DevicelessReport:
    x = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
        return compile_for(gpu_target(gpu), jax.jit(powers(size, num_warps)), x, compiler_options=options)


def test_a_kernel_that_fits(gpu: str) -> None:
    report = compile_powers(gpu, 64, 4, FAIL_ON_SPILLS)
    kernel, *others = report.kernels
    assert (kernel.name, kernel.launches, kernel.grid, kernel.threads) == ("powers", 1, (1, 1, 1), 128)
    assert 32 < kernel.registers <= 255
    assert kernel.spill_bytes == 0
    assert 64 * 64 * 2 <= kernel.shared_bytes <= gpu_target(gpu).spec.shared_memory_per_block
    assert others, "XLA's sum is a kernel, too"
    assert all(other.spill_bytes == 0 for other in others)


def test_spilled_registers_show(gpu: str) -> None:
    (kernel,) = (kernel for kernel in compile_powers(gpu, 128, 2).kernels if kernel.name == "powers")
    assert kernel.registers >= 32
    assert kernel.spill_bytes > 1024
    with pytest.raises(jax.errors.JaxRuntimeError, match="register spilling"):
        compile_powers(gpu, 128, 2, FAIL_ON_SPILLS)
