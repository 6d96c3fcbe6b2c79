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
from pallas_kernels.quantized_matmul.config import FEW_TOKENS, MIN_BLOCK_K, Tiles, block_k, tiles_for
from pallas_kernels.quantized_matmul.kernel_spec import KernelSpec
from pallas_kernels.quantized_matmul.operands import Surroundings, Weights, row_maxima, sums_of_squares, without_order
from pallas_kernels.quantized_matmul.triton_kernel import multiply_kernel
from pallas_kernels.quantized_matmul.xla import quantized_matmul_xla
from pallas_kernels.triton_call import check_addressable, triton_call

FIRST_WITH_E4M3 = (8, 9)


def check_triton(x: Any, weights: Any, around: Surroundings, device: Device | None) -> None:
    """Tells what the kernel cannot do and, where a device is given, what is left to XLA.

    Raises:
        NotImplementedError: what it is, and what to use instead.
    """
    codes, group = weights.codes, weights.group
    few = x.shape[0] <= FEW_TOKENS
    if device is not None and weights.bits == 8 and group == x.shape[1] and around.is_plain:
        capability = device.compute_capability
        if codes.dtype == jnp.int8 or capability is None or capability >= FIRST_WITH_E4M3:
            raise NotImplementedError("XLA converts 8-bit codes with one scale a row while it multiplies; use 'xla'")
    if x.dtype == jnp.float32:
        raise NotImplementedError("x of float32 would leave the tensor cores; use 'xla', bfloat16 or float16")
    if x.dtype == jnp.float16 and not (few and around.is_plain):
        # Weights of any scale meet the tensor cores there, and may be beyond float16; so may x times a norm's scale.
        raise NotImplementedError(
            f"{x.shape[0]} tokens of float16: the kernel is for at most {FEW_TOKENS} and for plain products; use 'xla'"
        )
    if not (few or around.is_plain):
        raise NotImplementedError(f"{x.shape[0]} tokens with more than a product: {FEW_TOKENS} at most; use 'xla'")
    if around.activation == "gelu":
        raise NotImplementedError("activation='gelu': Pallas-Triton has no error function; use 'xla' or 'gelu_tanh'")
    if around.act_dtype == "float8_e4m3fn" and device is not None:
        capability = device.compute_capability
        if capability is not None and capability < FIRST_WITH_E4M3:
            raise NotImplementedError("float8_e4m3fn needs compute capability 8.9; use 'xla'")
    if block_k(group) < MIN_BLOCK_K:
        raise NotImplementedError(f"group={group} must be a multiple of {MIN_BLOCK_K}; use 'xla'")
    check_addressable(codes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def quantized_matmul_triton(
    x: jax.Array, weights: Weights, around: Surroundings, out_dtype: Any, interpret: bool
) -> Any:
    """Same contract as `quantized_matmul`; derivatives are plain XLA's.

    Raises:
        NotImplementedError: as `check_triton`.
    """
    if x.shape[0] > FEW_TOKENS:
        # Every tile of the weights' rows would pick x's channels out of memory again.
        x, weights = without_order(x, weights)
    spec = _spec_of(x, weights, around, interpret)
    tiles, whole = spec.tiles, spec.tiles.splits == 1
    shape = jax.ShapeDtypeStruct
    results = [shape((tiles.splits, spec.num_tokens, spec.num_out), out_dtype if whole else jnp.float32)]
    if spec.gives_maxima:
        results.append(shape((spec.out_tiles, spec.num_tokens), jnp.float32))
    sums, *maxima = triton_call(
        functools.partial(multiply_kernel, spec),
        name="quantized_matmul",
        out_shape=tuple(results),
        grid=(spec.token_tiles * spec.out_tiles, tiles.splits),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
    )(*_operands(spec, x, weights, around))
    if whole:
        out = sums[0]
    else:
        out = functools.reduce(operator.add, [sums[index] for index in range(tiles.splits)]).astype(out_dtype)
    return (out, maxima[0]) if maxima else out


def _spec_of(x: Any, weights: Weights, around: Surroundings, interpret: bool) -> KernelSpec:
    (num_tokens, channels), rows = x.shape, weights.codes.shape[0]
    device = current_device()
    maxima = around.row_maxima
    return KernelSpec(
        tiles=_tiles(device, num_tokens, rows, channels, weights, around),
        num_tokens=num_tokens,
        num_out=rows if around.activation is None else rows // 2,
        channels=channels,
        bits=weights.bits,
        group=weights.group,
        code_dtype=weights.codes.dtype,
        has_offset=weights.offset is not None,
        has_table=weights.codebook is not None,
        dtype=x.dtype,
        weights_first=device.compute_capability in HOPPER,
        interpret=interpret,
        has_scale_table=weights.scale_table is not None,
        has_order=weights.order is not None,
        has_norm=around.norm is not None,
        epsilon=around.epsilon,
        activation=around.activation,
        act_dtype=around.act_dtype,
        num_maxima=0 if around.act_dtype is None else 1 if maxima is None else maxima.shape[0],
        gives_maxima=around.gives_maxima,
    )


def _tiles(device: Device, num_tokens: int, rows: int, channels: int, weights: Weights, around: Surroundings) -> Tiles:
    shares = around.activation is not None or around.norm is not None or around.gives_maxima
    return tiles_for(
        device,
        num_tokens=num_tokens,
        num_out=rows if around.activation is None else rows // 2,
        channels=channels,
        bits=weights.bits,
        group=weights.group,
        whole=shares,
    )


def _operands(spec: KernelSpec, x: jax.Array, weights: Weights, around: Surroundings) -> list[jax.Array]:
    """In the order of `refs_of`."""
    given: list[jax.Array | None] = [x, weights.codes, weights.scale, weights.offset, weights.codebook]
    if weights.scale_table is not None:
        given += [weights.scale_table.book, weights.scale_table.blocks, weights.scale_table.offset.reshape(1)]
    given += [weights.order, around.norm]
    if spec.act_dtype is not None:
        given.append(row_maxima(x, around.norm)[None] if around.row_maxima is None else around.row_maxima)
        given.append(sums_of_squares(x) if spec.has_norm else None)
    return [array for array in given if array is not None]


@quantized_matmul_triton.defjvp
def _jvp(out_dtype: Any, interpret: bool, primals: Any, tangents: Any) -> Any:
    del interpret
    return jax.jvp(functools.partial(quantized_matmul_xla, out_dtype=out_dtype), primals, tangents)
