"""The operation on Pallas's Triton backend: NVIDIA GPUs from Ampere on, or interpreted anywhere.

A tile of packed codes goes from memory to registers, becomes bfloat16 there and meets the tensor cores; there is no
other copy of it. Where channels are cut into pieces, their float32 sums are added up in order by XLA, which merges that
with what follows.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Device, current_device
from pallas_kernels.paged_attention.config import HOPPER
from pallas_kernels.quantized_matmul.config import FEW_TOKENS, MIN_BLOCK_K, block_k, tiles_for
from pallas_kernels.quantized_matmul.triton_kernel import KernelSpec, multiply_kernel
from pallas_kernels.quantized_matmul.xla import quantized_matmul_xla
from pallas_kernels.triton_call import check_addressable, triton_call


def check_triton(x: Any, codes: Any, group: int, device: Device | None) -> None:
    """Tells what the kernel cannot do and, where a device is given, what is left to XLA.

    Raises:
        NotImplementedError: what it is, and what to use instead.
    """
    if device is not None and codes.dtype == jnp.int8 and group == x.shape[1]:
        raise NotImplementedError("XLA converts 8-bit codes with one scale a row while it multiplies; use 'xla'")
    if x.dtype == jnp.float32:
        raise NotImplementedError("x of float32 would leave the tensor cores; use 'xla', bfloat16 or float16")
    if x.dtype == jnp.float16 and x.shape[0] > FEW_TOKENS:
        # Weights of any scale meet the tensor cores there, and may be beyond float16.
        raise NotImplementedError(f"{x.shape[0]} tokens of float16: the kernel is for at most {FEW_TOKENS}; use 'xla'")
    if block_k(group) < MIN_BLOCK_K:
        raise NotImplementedError(f"group={group} must be a multiple of {MIN_BLOCK_K}; use 'xla'")
    check_addressable(codes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(5, 6, 7))
def quantized_matmul_triton(
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array,
    offset: jax.Array | None,
    codebook: jax.Array | None,
    bits: int,
    out_dtype: Any,
    interpret: bool,
) -> jax.Array:
    """Same contract as `quantized_matmul`; the group follows from the shapes, and derivatives are plain XLA's.

    Raises:
        NotImplementedError: as `check_triton`.
    """
    (num_tokens, channels), num_out = x.shape, codes.shape[0]
    group = channels // scale.shape[1]
    device = current_device()
    tiles = tiles_for(device, num_tokens=num_tokens, num_out=num_out, channels=channels, bits=bits, group=group)
    spec = KernelSpec(
        tiles=tiles,
        num_tokens=num_tokens,
        num_out=num_out,
        channels=channels,
        bits=bits,
        group=group,
        has_offset=offset is not None,
        has_table=codebook is not None,
        dtype=x.dtype,
        weights_first=device.compute_capability in HOPPER,
        interpret=interpret,
    )
    whole = tiles.splits == 1
    sums = triton_call(
        functools.partial(multiply_kernel, spec),
        name="quantized_matmul",
        out_shape=jax.ShapeDtypeStruct((tiles.splits, num_tokens, num_out), out_dtype if whole else jnp.float32),
        grid=(spec.token_tiles * spec.out_tiles, tiles.splits),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
    )(x, codes, scale, *(array for array in (offset, codebook) if array is not None))
    if whole:
        return sums[0]
    return functools.reduce(operator.add, [sums[index] for index in range(tiles.splits)]).astype(out_dtype)


@quantized_matmul_triton.defjvp
def _jvp(bits: int, out_dtype: Any, interpret: bool, primals: Any, tangents: Any) -> Any:
    del interpret
    return jax.jvp(functools.partial(quantized_matmul_xla, bits=bits, out_dtype=out_dtype), primals, tangents)
