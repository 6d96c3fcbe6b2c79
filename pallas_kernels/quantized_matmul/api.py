"""The public operation: documentation, checks, choice of implementation."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import choose
from pallas_kernels.kv_format import FLOAT_DTYPES
from pallas_kernels.quantized_matmul.config import FEW_TOKENS, block_k
from pallas_kernels.quantized_matmul.reference import quantized_matmul_reference
from pallas_kernels.quantized_matmul.triton import check_triton, quantized_matmul_triton
from pallas_kernels.quantized_matmul.xla import quantized_matmul_xla

OP = "quantized_matmul"
CODE_DTYPES = {4: jnp.dtype(jnp.uint8), 8: jnp.dtype(jnp.int8)}
"""Of the codes, by bits."""


def quantized_matmul(
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array,
    *,
    offset: jax.Array | None = None,
    codebook: jax.Array | None = None,
    bits: int,
    group: int,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """``x . w^T`` with weights w[N, K] of 4 or 8 bits, which are dequantised on their way to the product.

    ``w[n, k] = code[n, k] * scale[n, k // group] + offset[n, k // group]``, or ``codebook[code] * scale`` in place of
    it. The offset is a float, so that one form serves GGUF's Q4_0 and Q4_1, AWQ (arXiv:2306.00978), GPTQ
    (arXiv:2210.17323) and symmetric int4, whose offset is ``-8 * scale``; the codebook serves NF4 (arXiv:2305.14314).
    Sums are float32.

    Args:
        x: [M, K], float32, bfloat16 or float16.
        codes: bits 4: uint8[N, K / 2], two codes of 0 .. 15 a byte, that of the even channel in the low nibble;
            bits 8: int8[N, K].
        scale: [N, K / group], float32, bfloat16 or float16; any finite value, 0 too.
        offset: likewise, or None for 0.
        codebook: float32[16], for 4 bits without an offset. On tensor cores its entries are rounded to x's dtype.
        bits: 4 or 8.
        group: channels that share a scale; divides K, and is even for 4 bits. K itself is one scale a row.
        out_dtype: float32, bfloat16 or float16; None is x's.
        implementation: one of `pallas_kernels.dispatch.IMPLEMENTATIONS`; None chooses for the current device.

    Returns:
        [M, N] in `out_dtype`.

    Raises:
        ValueError: shapes, dtypes or options that do not fit together, or an unknown implementation.
    """
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    _check(x, codes, scale, offset, codebook, bits, group, out_dtype)
    name = chosen_implementation(
        x, codes, scale, offset=offset, codebook=codebook, bits=bits, group=group, implementation=implementation
    )
    if x.size and codes.size and name.startswith("triton"):
        return quantized_matmul_triton(x, codes, scale, offset, codebook, bits, out_dtype, name == "triton-interpret")
    function = quantized_matmul_reference if name == "reference" else quantized_matmul_xla
    return function(x, codes, scale, offset, codebook, bits=bits, out_dtype=out_dtype)


def chosen_implementation(
    x: Any,
    codes: Any,
    scale: Any,
    *,
    offset: Any = None,
    codebook: Any = None,
    bits: int,
    group: int,
    implementation: str | None = None,
) -> str:
    """What `quantized_matmul` would run for operands of these shapes and dtypes.

    Raises:
        ValueError: an unknown implementation.
    """
    few = x.shape[0] <= FEW_TOKENS
    into = block_k(group)
    case = (str(x.dtype), bits, into, scale.shape[1] > 1, offset is not None, codebook is not None, few)
    name = choose(OP, implementation, check=partial(check_triton, x, codes, group), self_check=_self_check, case=case)
    if implementation is not None and name.startswith("triton"):
        check_triton(x, codes, group, None)
    return name


def _self_check(
    implementation: str, dtype: str, bits: int, into: int, grouped: bool, has_offset: bool, has_table: bool, few: bool
) -> jax.Array:
    """Tiles that are not full, and enough of them to fill the pipeline."""
    rng = np.random.default_rng(0)
    tokens, rows, groups = 5 if few else 70, 80, 8 if grouped else 1
    channels = 8 * into
    x = jnp.asarray(rng.standard_normal((tokens, channels)), dtype)
    low, high, code_dtype = (0, 256, np.uint8) if bits == 4 else (-128, 128, np.int8)
    codes = jnp.asarray(rng.integers(low, high, (rows, channels * bits // 8)).astype(code_dtype))
    scale, offset = (jnp.asarray(rng.uniform(-1, 1, (rows, groups)), jnp.float32) for _ in range(2))
    return quantized_matmul(
        x,
        codes,
        scale,
        offset=8 * offset if has_offset else None,
        codebook=jnp.asarray(rng.uniform(-1, 1, 16), jnp.float32) if has_table else None,
        bits=bits,
        group=channels // groups,
        implementation=implementation,
    )


def _check(x: Any, codes: Any, scale: Any, offset: Any, codebook: Any, bits: int, group: int, out_dtype: Any) -> None:
    if bits not in CODE_DTYPES:
        raise ValueError(f"bits={bits} of {OP} must be 4 or 8")
    if codes.dtype != CODE_DTYPES[bits]:
        raise ValueError(f"codes of {codes.dtype} with bits={bits} must be {CODE_DTYPES[bits]}")
    floats = {"x": x.dtype, "scale": scale.dtype, "out_dtype": out_dtype}
    if offset is not None:
        floats["offset"] = offset.dtype
    for field, dtype in floats.items():
        if dtype not in FLOAT_DTYPES:
            raise ValueError(f"{field} ({dtype}) of {OP} must be one of {', '.join(map(str, FLOAT_DTYPES))}")
    if x.ndim != 2 or codes.ndim != 2 or 8 * codes.shape[1] != bits * x.shape[1]:
        wanted = "[N, K / 2], K even" if bits == 4 else "[N, K]"
        raise ValueError(f"x{x.shape} must be [M, K] and codes{codes.shape} {wanted} with bits={bits}")
    channels = x.shape[1]
    if group < 1 or channels % group or (bits == 4 and group % 2):
        even = ", be even" if bits == 4 else ""
        raise ValueError(f"group={group} must divide K={channels}{even}; K itself is one scale a row")
    groups = (codes.shape[0], channels // group)
    if scale.shape != groups or (offset is not None and offset.shape != groups):
        given = "" if offset is None else f" and offset{offset.shape}"
        raise ValueError(f"scale{scale.shape}{given} must be [N, K / group], {groups} with group={group}")
    if codebook is None:
        return
    if codebook.shape != (16,) or codebook.dtype != jnp.float32:
        raise ValueError(f"codebook {codebook.dtype}{codebook.shape} must be float32[16]")
    if bits != 4 or offset is not None:
        raise ValueError("a codebook goes with bits=4 and without an offset: put the offset into its entries")
