"""The one way to Pallas's Triton backend."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

NOTICE = "The Pallas Triton backend is deprecated"


def triton_call(
    kernel: Callable[..., None],
    *,
    name: str,
    out_shape: Any,
    grid: Sequence[int],
    num_warps: int,
    num_stages: int = 1,
    interpret: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """`pl.pallas_call` on its Triton backend, without the deprecation notice newer JAX gives for every such kernel.

    Args:
        kernel: takes one reference for each operand, then one for each result.
        name: of the kernel, as profiles and dumps show it.
        out_shape: `jax.ShapeDtypeStruct`s of the results.
        grid: up to three sizes; the first may be up to 2^31 - 1, the others 65535.
        num_warps: of 32 threads, a power of two.
        num_stages: of the software pipeline of loops.
        interpret: run on any device, slowly.
        options: further arguments of `pl.pallas_call`, such as ``input_output_aliases``.

    Returns:
        a function of the operands.
    """
    if any(size > 65535 for size in grid[1:]):
        raise NotImplementedError(f"grid={tuple(grid)} of {name}: CUDA allows 65535 beyond the first axis")
    make: Any = pl.pallas_call
    call = make(
        kernel,
        name=name,
        out_shape=out_shape,
        grid=tuple(grid),
        interpret=interpret,
        compiler_params=_compiler_params()(num_warps=num_warps, num_stages=num_stages),
        **options,
    )

    def call_in_32_bits(*operands: Any) -> Any:
        # Where 64 bits are JAX's default, a kernel's own numbers would not go with the 32 bits of program ids.
        with jax.enable_x64(False):
            return call(*operands)

    return call_in_32_bits


@functools.cache
def _compiler_params() -> Any:
    """`plt.CompilerParams`, of a class of our own.

    Pallas picks the lowering rule by the class, which makes it the place to silence the notice: lowering happens long
    after the call, when whoever traced our kernel compiles, and their other warnings are none of our business. This
    takes two internals of JAX; where they are gone the kernels still work, and the notice shows.
    """
    try:
        from jax._src.pallas.core import register_lowering_rule
        from jax._src.pallas.triton.pallas_call_registration import pallas_call_lowering
    except ImportError:
        return plt.CompilerParams

    @dataclasses.dataclass(frozen=True)
    class QuietCompilerParams(plt.CompilerParams):
        """`plt.CompilerParams` whose kernels are lowered without the deprecation notice."""

    @functools.wraps(pallas_call_lowering)
    def lower_quietly(*args: Any, **params: Any) -> Any:
        with warnings.catch_warnings(), jax.enable_x64(False):
            warnings.filterwarnings("ignore", message=NOTICE, category=DeprecationWarning)
            return pallas_call_lowering(*args, **params)

    register_lowering_rule(QuietCompilerParams, lower_quietly, "gpu")
    return QuietCompilerParams


def check_addressable(*arrays: Any) -> None:
    """Raises NotImplementedError for arrays that Pallas-Triton computes wrong addresses for.

    It takes 32-bit offsets, in elements and with a sign, for arrays of up to 4 GiB: too little for 8-bit elements from
    2 GiB on. Beyond 4 GiB its offsets have 64 bits.
    """
    for array in arrays:
        if array is not None and array.dtype.itemsize == 1 and 1 << 31 < array.size <= 1 << 32:
            raise NotImplementedError(
                f"{array.dtype}{array.shape} has between 2 and 4 GiB of 8-bit elements, which Pallas-Triton cannot "
                "address; take fewer or more pages"
            )
