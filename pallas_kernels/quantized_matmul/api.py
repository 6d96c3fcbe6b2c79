"""The public operation: documentation, checks, choice of implementation."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import choose
from pallas_kernels.gated_matmul.reference import ACTIVATIONS
from pallas_kernels.kv_format import FLOAT_DTYPES
from pallas_kernels.quantized_matmul.config import FEW_TOKENS, block_k
from pallas_kernels.quantized_matmul.operands import CODE_LIMITS, SCALES_A_BLOCK, ScaleTable, Surroundings, Weights
from pallas_kernels.quantized_matmul.reference import quantized_matmul_reference
from pallas_kernels.quantized_matmul.triton import check_triton, quantized_matmul_triton
from pallas_kernels.quantized_matmul.xla import product_xla, quantized_matmul_xla, surrounded

OP = "quantized_matmul"
CODE_DTYPES = {4: ("uint8",), 8: ("int8", "float8_e4m3fn")}
"""Of the codes, by bits."""


def quantized_matmul(
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array,
    *,
    offset: jax.Array | None = None,
    codebook: jax.Array | None = None,
    order: jax.Array | None = None,
    scale_table: ScaleTable | None = None,
    bits: int,
    group: int,
    norm: jax.Array | None = None,
    epsilon: float | None = None,
    activation: str | None = None,
    act_dtype: str | None = None,
    row_maxima: jax.Array | None = None,
    gives_maxima: bool = False,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> Any:
    """``x . w^T`` with weights w[N, K] of 4 or 8 bits, which are dequantised on their way to the product.

    ``w[n, k] = code[n, k] * scale[n, k // group] + offset[n, k // group]``, or ``codebook[code] * scale`` in place of
    it. The offset is a float, so that one form serves GGUF's Q4_0 and Q4_1, AWQ (arXiv:2306.00978), GPTQ
    (arXiv:2210.17323) and symmetric int4, whose offset is ``-8 * scale``; the codebook serves NF4 (arXiv:2305.14314).
    Sums are float32, or exact of int8 by int8.

    For the few tokens of a decode step one launch on a GPU does more than the product: it normalises x, rounds its rows
    to 8 bits, and gates the result.

    Args:
        x: [M, K], float32, bfloat16 or float16.
        codes: bits 4: uint8[N, K / 2], two codes of 0 .. 15 a byte, that of the even channel in the low nibble;
            bits 8: int8[N, K] or float8_e4m3fn[N, K].
        scale: [N, K / group], float32, bfloat16 or float16; any finite value, 0 too.
        offset: likewise, or None for 0.
        codebook: float32[16], for 4 bits without an offset. On tensor cores its entries are rounded to x's dtype.
        scale_table: what scales stand for that are codes themselves, uint8[N, K / group].
        order: int32[K], a permutation: the weights' channel j meets x's channel ``order[j]``; None for ``j``.
        bits: 4 or 8.
        group: channels that share a scale; divides K, and is even for 4 bits. K itself is one scale a row.
        norm: [K] in x's dtype: x's rows are first divided by their root mean square and multiplied by it
            (arXiv:1910.07467).
        epsilon: of the norm, above 0; goes with it.
        activation: one of `pallas_kernels.gated_matmul.ACTIVATIONS`: the result is
            ``activation(first N / 2 columns) * other columns`` (arXiv:2002.05202).
        act_dtype: the dtype of codes of 8 bits with one scale a row and no offset: rows of x are rounded to it, each
            with a scale of its own, so that its largest magnitude is the largest code.
        row_maxima: float32[any, M], what `gives_maxima` gave with x; saves reading x twice. None computes them.
        gives_maxima: whether to return also float32[any, M], whose largest is a row's of the result.
        out_dtype: float32, bfloat16 or float16; None is x's.
        implementation: one of `pallas_kernels.dispatch.IMPLEMENTATIONS`; None chooses for the current device.

    Returns:
        [M, N] in `out_dtype`, or [M, N / 2] behind a gate; with `gives_maxima` this and the maxima.

    Raises:
        ValueError: shapes, dtypes or options that do not fit together, or an unknown implementation.
    """
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    weights = Weights(codes, scale, offset, codebook, order, bits, scale_table)
    around = Surroundings(norm, row_maxima, epsilon or 0.0, activation, act_dtype, gives_maxima)
    _check(x, weights, group, out_dtype)
    _check_surroundings(x, weights, around, epsilon)
    name = _chosen(x, weights, around, implementation)
    if not (x.size and codes.size):
        name = "xla"
    if name.startswith("triton"):
        return quantized_matmul_triton(x, weights, around, out_dtype, name == "triton-interpret")
    if name == "reference":
        return quantized_matmul_reference(x, weights, around, out_dtype)
    if implementation is None and around.act_dtype is None and not around.is_plain:
        # Many tokens: XLA does what is around the product, which may have a kernel all the same.
        return surrounded(x, weights, around, out_dtype, _plain)
    return quantized_matmul_xla(x, weights, around, out_dtype)


def _plain(x: jax.Array, weights: Weights, out_dtype: Any) -> jax.Array:
    if _chosen(x, weights, Surroundings(), None) == "triton":
        result: jax.Array = quantized_matmul_triton(x, weights, Surroundings(), out_dtype, False)
        return result
    return product_xla(x, weights, out_dtype)


def chosen_implementation(
    x: Any,
    codes: Any,
    scale: Any,
    *,
    offset: Any = None,
    codebook: Any = None,
    order: Any = None,
    scale_table: Any = None,
    bits: int,
    norm: Any = None,
    activation: str | None = None,
    act_dtype: str | None = None,
    implementation: str | None = None,
) -> str:
    """What `quantized_matmul` would run for operands of these shapes and dtypes.

    Raises:
        ValueError: an unknown implementation.
    """
    weights = Weights(codes, scale, offset, codebook, order, bits, scale_table)
    return _chosen(x, weights, Surroundings(norm, None, 1.0, activation, act_dtype), implementation)


def _chosen(x: Any, weights: Weights, around: Surroundings, implementation: str | None) -> str:
    case = (
        str(x.dtype),
        str(weights.codes.dtype),
        block_k(weights.group),
        weights.scale.shape[1] > 1,
        weights.offset is not None,
        weights.codebook is not None,
        weights.scale_table is not None,
        weights.order is not None,
        x.shape[0] <= FEW_TOKENS,
        around.norm is not None,
        around.activation,
        around.act_dtype is not None,
    )
    check = partial(check_triton, x, weights, around)
    name = choose(OP, implementation, check=check, self_check=_self_check, case=case)
    if implementation is not None and name.startswith("triton"):
        check(None)
    return name


def _self_check(
    implementation: str,
    dtype: str,
    code_dtype: str,
    into: int,
    grouped: bool,
    has_offset: bool,
    has_table: bool,
    codes_scales: bool,
    has_order: bool,
    few: bool,
    has_norm: bool,
    activation: str | None,
    rounds: bool,
) -> Any:
    """Tiles that are not full, and enough of them to fill the pipeline."""
    rng = np.random.default_rng(0)
    tokens, rows, groups = 5 if few else 70, 80, 8 if grouped else 1
    channels, bits = 8 * into, 4 if code_dtype == "uint8" else 8
    x = jnp.asarray(rng.standard_normal((tokens, channels)), dtype)
    codes = rng.integers(0, 256, (rows, channels * bits // 8)).astype(np.uint8)
    if code_dtype == "float8_e4m3fn":
        codes = np.where((codes & 0x7F) == 0x7F, np.uint8(0), codes)  # NaN
    scale, offset = (jnp.asarray(rng.uniform(-1, 1, (rows, groups)), jnp.float32) for _ in range(2))
    norm = jnp.asarray(rng.uniform(0.5, 2, channels), dtype) if has_norm else None
    table = None
    if codes_scales:
        scale = jnp.asarray(rng.integers(0, 256, scale.shape), jnp.uint8)
        blocks = jnp.asarray(rng.uniform(0.5, 2, -(-scale.size // SCALES_A_BLOCK)), jnp.float32)
        table = ScaleTable(jnp.linspace(-1, 1, 256, dtype=jnp.float32), blocks, jnp.float32(0.5))
    gives_maxima = rounds and activation is not None
    result = quantized_matmul(
        x,
        jnp.asarray(codes.view(jnp.dtype(code_dtype))),
        scale,
        offset=8 * offset if has_offset else None,
        codebook=jnp.asarray(rng.uniform(-1, 1, 16), jnp.float32) if has_table else None,
        scale_table=table,
        order=jnp.asarray(rng.permutation(channels), jnp.int32) if has_order else None,
        bits=bits,
        group=channels // groups,
        norm=norm,
        epsilon=1e-5 if has_norm else None,
        activation=activation,
        act_dtype=code_dtype if rounds else None,
        gives_maxima=gives_maxima,
        implementation=implementation,
    )
    return (result[0], jnp.max(result[1], axis=0).astype(dtype)) if gives_maxima else result


def _check(x: Any, weights: Weights, group: int, out_dtype: Any) -> None:
    codes, scale, offset, codebook, bits = (
        weights.codes,
        weights.scale,
        weights.offset,
        weights.codebook,
        weights.bits,
    )
    if bits not in CODE_DTYPES:
        raise ValueError(f"bits={bits} of {OP} must be 4 or 8")
    if str(codes.dtype) not in CODE_DTYPES[bits]:
        raise ValueError(f"codes of {codes.dtype} with bits={bits} must be {' or '.join(CODE_DTYPES[bits])}")
    floats = {"x": x.dtype, "out_dtype": out_dtype} | ({} if weights.scale_table else {"scale": scale.dtype})
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
    table = weights.scale_table
    if table is not None and (scale.dtype != jnp.uint8 or table.blocks.shape != (-(-scale.size // SCALES_A_BLOCK),)):
        raise ValueError(
            f"scale ({scale.dtype}) with a scale_table of blocks{table.blocks.shape} must be uint8, and have one block "
            f"for each {SCALES_A_BLOCK} scales"
        )
    if weights.order is not None and (weights.order.shape != (channels,) or weights.order.dtype != jnp.int32):
        raise ValueError(f"order {weights.order.dtype}{weights.order.shape} must be int32[{channels}]")
    if codebook is None:
        return
    if codebook.shape != (16,) or codebook.dtype != jnp.float32:
        raise ValueError(f"codebook {codebook.dtype}{codebook.shape} must be float32[16]")
    if bits != 4 or offset is not None:
        raise ValueError("a codebook goes with bits=4 and without an offset: put the offset into its entries")


def _check_surroundings(x: Any, weights: Weights, around: Surroundings, epsilon: float | None) -> None:
    tokens, channels = x.shape
    norm, maxima = around.norm, around.row_maxima
    if norm is not None and (norm.shape != (channels,) or norm.dtype != x.dtype):
        raise ValueError(f"norm {norm.dtype}{norm.shape} must be {x.dtype}[{channels}]")
    if (norm is None) != (epsilon is None) or not (epsilon is None or epsilon > 0):
        raise ValueError(f"epsilon={epsilon} must be above 0 with a norm, and None without")
    if around.activation is not None and (around.activation not in ACTIVATIONS or weights.codes.shape[0] % 2):
        allowed = ", ".join(ACTIVATIONS)
        raise ValueError(
            f"activation={around.activation!r} must be one of {allowed}, and N={weights.codes.shape[0]} even"
        )
    if around.act_dtype is not None and (
        around.act_dtype not in CODE_LIMITS
        or around.act_dtype != str(weights.codes.dtype)
        or weights.scale.shape[1] != 1
        or weights.offset is not None
    ):
        raise ValueError(
            f"act_dtype={around.act_dtype!r} goes with codes of that dtype, one of {', '.join(CODE_LIMITS)}, one scale "
            "a row and no offset"
        )
    if maxima is None:
        return
    if maxima.ndim != 2 or maxima.shape[1] != tokens or not maxima.shape[0] or maxima.dtype != jnp.float32:
        raise ValueError(f"row_maxima {maxima.dtype}{maxima.shape} must be float32[any, {tokens}]")
    if around.act_dtype is None or norm is not None:
        raise ValueError("row_maxima are of what is rounded: they go with act_dtype and without a norm")
