"""Every kernel and case that the audit compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.planning.deviceless import DevicelessReport, compile_for, gpu_target
from pallas_kernels.block_copy import block_copy
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.flash_attention.cases import CASES, FlashCase
from pallas_kernels.gated_matmul import norm_gated_matmul
from pallas_kernels.kv_format import FORMATS, format_of
from pallas_kernels.kv_write import kv_write, rope_kv_write
from pallas_kernels.paged_attention import make_work_list, paged_attention
from pallas_kernels.paged_attention.cases import MODELS, AttentionShape, abstract_operands, pairwise_shapes
from pallas_kernels.quantized_matmul import quantized_matmul

DECODE = {"num_tokens": 32, "num_rows": 32}
MIXED = {"num_tokens": 2048, "num_rows": 32}
PAGES_PER_ROW = 512
NUM_PAGES = 8192


@dataclass(frozen=True)
class KernelCase:
    """A case of an operation.

    Attributes:
        op: the operation; its kernels' names begin with it.
        name: of the case.
        function: to compile.
        arguments: shapes.
        donated: index of an argument that is updated in place, if any.
    """

    op: str
    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()

    def compile(self, gpu: str) -> DevicelessReport:
        """Compiles the implementation that dispatch chooses for `gpu`."""
        function = jax.jit(self.function, donate_argnums=self.donated)
        return compile_for(gpu_target(gpu), function, *self.arguments)


def kernel_cases() -> Mapping[tuple[str, str], KernelCase]:
    """All cases by operation and name."""
    cases = [*_paged_cases(), *_flash_cases(), *_write_cases(), *_gated_cases(), *_quantized_cases()]
    return {(case.op, case.name): case for case in cases}


def _paged_cases() -> list[KernelCase]:
    shapes = dict(MODELS)
    for name in ("llama-3-8b", "llama-3-70b", "qwen2.5-7b"):
        for kv_format in FORMATS:
            shapes[f"{name} {kv_format.name}"] = replace(MODELS[name], pages_dtype=str(kv_format.dtype))
    cases = [
        _paged(f"{name} {step}", shape, sizes)
        for name, shape in shapes.items()
        for step, sizes in (("decode", DECODE), ("mixed", MIXED))
    ]
    return cases + [_paged(str(shape), shape, MIXED) for shape in pairwise_shapes()]


def _paged(name: str, shape: AttentionShape, sizes: Mapping[str, int]) -> KernelCase:
    def attend(operands: dict[str, Any]) -> jax.Array:
        starts, contexts = operands["query_start"], operands["context_lens"]
        work = make_work_list(
            starts,
            contexts,
            num_tokens=sizes["num_tokens"],
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            window=shape.window,
        )
        return paged_attention(**operands, **shape.options, work_list=work)

    operands = abstract_operands(shape, **sizes, pages_per_row=PAGES_PER_ROW, num_pages=NUM_PAGES)
    return KernelCase("paged_attention", name, attend, (operands,))


def _flash_cases() -> list[KernelCase]:
    return [KernelCase("flash_attention", name, *_gradients(case)) for name, case in CASES.items()]


def _gradients(case: FlashCase) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Forward and backward pass in one program, and its arguments."""

    def gradients(operands: dict[str, Any], out_grad: jax.Array) -> Any:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            return flash_attention(**{**operands, "q": q, "k": k, "v": v}, **case.options)

        out, pullback = jax.vjp(attend, operands["q"], operands["k"], operands["v"])
        return out, pullback(out_grad)

    operands = case.abstract_operands()
    return gradients, (operands, operands["q"])


def _write_cases() -> list[KernelCase]:
    cases = []
    for dtype in ("bfloat16", "float16", *(str(kv_format.dtype) for kv_format in FORMATS)):
        kv_format = format_of(dtype)
        name = kv_format.name if kv_format else dtype
        for heads, group, width in ((8, 4, 128), (32, 1, 96), (1, 16, 256)):
            queries = "float16" if dtype == "float16" else "bfloat16"
            cases += _writes(f"{heads * group}:{heads} h{width} {name}", heads, group, width, queries, dtype)
    return cases


def _writes(name: str, heads: int, group: int, width: int, queries: str, dtype: str) -> list[KernelCase]:
    """rope_kv_write and, of Llama's shape, kv_write and block_copy of 32 tokens or pages."""
    shape = (NUM_PAGES, 2 * heads, 16, width // 2 if dtype == "uint8" else width)
    pages = jax.ShapeDtypeStruct(shape, dtype)
    scales = jax.ShapeDtypeStruct(shape[:3], jnp.float32) if format_of(dtype) else None
    index = jax.ShapeDtypeStruct((32,), jnp.int32)
    row = jax.ShapeDtypeStruct((32, heads, width), queries)
    qkv = jax.ShapeDtypeStruct((32, heads, group + 2, width), queries)
    angles = jax.ShapeDtypeStruct((32, width // 2), jnp.float32)
    operations: tuple[tuple[str, Callable[..., Any], tuple[Any, ...]], ...] = (
        ("rope_kv_write", rope_kv_write, (qkv, angles, angles)),
        ("kv_write", kv_write, (row, row)),
        ("block_copy", block_copy, ()),
    )
    return [
        KernelCase(op, name, partial(_in_pool, function), (operands, (pages, scales), index, index), donated=(1,))
        for op, function, operands in (operations if width == 128 else operations[:1])
    ]


def _gated_cases() -> list[KernelCase]:
    sizes = {"llama-3-8b": (4096, 14336), "llama-3-70b": (8192, 28672), "qwen2.5-0.5b": (896, 4864)}
    cases = []
    for name, (channels, gates) in sizes.items():
        for tokens in (1, 32, 64):
            x = jax.ShapeDtypeStruct((tokens, channels), jnp.bfloat16)
            scale = jax.ShapeDtypeStruct((channels,), jnp.bfloat16)
            weights = jax.ShapeDtypeStruct((2, gates, channels), jnp.bfloat16)
            for activation in ("silu", "gelu_tanh", "relu") if tokens == 32 else ("silu",):
                function = partial(norm_gated_matmul, epsilon=1e-5, activation=activation)
                label = f"{name}, {tokens} tokens, {activation}"
                cases.append(KernelCase("norm_gated_matmul", label, function, (x, scale, weights)))
    return cases


def _quantized_cases() -> list[KernelCase]:
    """Llama-3-8B's down and up projections; every form of weights with few, some and many tokens."""
    forms = [
        (4, 128, "offset"),
        (4, 32, "offset"),
        (4, 64, "codebook"),
        (4, 0, "offset"),
        (8, 32, ""),
        (8, 128, "offset"),
    ]
    cases = []
    for rows, channels in ((14336, 4096), (4096, 14336)):
        for bits, group, extra in forms:
            for tokens in (1, 32, 64, 2048):
                codes = jax.ShapeDtypeStruct((rows, channels * bits // 8), jnp.uint8 if bits == 4 else jnp.int8)
                scale = jax.ShapeDtypeStruct((rows, channels // (group or channels)), jnp.float32)
                table = jax.ShapeDtypeStruct((16,), jnp.float32)
                named = {"offset": {"offset": scale}, "codebook": {"codebook": table}, "": {}}[extra]
                x = jax.ShapeDtypeStruct((tokens, channels), jnp.bfloat16)
                label = f"{rows}x{channels}, {bits} bits, group {group or 'row'} {extra}, {tokens} tokens"
                function = partial(_multiply_packed, bits, group or channels)
                cases.append(KernelCase("quantized_matmul", label, function, (x, codes, scale, named)))
    return cases + [_gated_quantized_case(*form) for form in _GATED_FORMS]


_GATED_FORMS = [
    (tokens, *form)
    for tokens in (1, 16, 32)
    for form in (
        ("uint8", 128, False),
        ("uint8", 32, False),
        ("float8_e4m3fn", 128, False),
        ("int8", 4096, False),
        ("int8", 4096, True),
        ("float8_e4m3fn", 4096, True),
    )
]
"""Tokens, codes, group, whether activations are rounded: Llama-3-8B's norm, gate and up projections."""


def _gated_quantized_case(tokens: int, code_dtype: str, group: int, rounds: bool) -> KernelCase:
    bits, rows, channels = 4 if code_dtype == "uint8" else 8, 28672, 4096
    codes = jax.ShapeDtypeStruct((rows, channels * bits // 8), code_dtype)
    scale = jax.ShapeDtypeStruct((rows, channels // group), jnp.float32)
    norm = jax.ShapeDtypeStruct((channels,), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((tokens, channels), jnp.bfloat16)
    words = ", rounded" * rounds
    label = f"norm and gate of 2 x {rows // 2}x{channels}, {code_dtype}, group {group}{words}, {tokens} tokens"
    named = {"norm": norm} | ({"offset": scale} if bits == 4 else {})
    function = partial(_multiply_gated, bits, group, code_dtype if rounds else None)
    return KernelCase("quantized_matmul", label, function, (x, codes, scale, named))


def _multiply_gated(
    bits: int, group: int, act_dtype: str | None, x: jax.Array, codes: jax.Array, scale: jax.Array, named: Any
) -> Any:
    options: dict[str, Any] = {"bits": bits, "group": group, "act_dtype": act_dtype, "activation": "silu"}
    return quantized_matmul(x, codes, scale, epsilon=1e-5, gives_maxima=act_dtype is not None, **options, **named)


def _multiply_packed(bits: int, group: int, x: jax.Array, codes: jax.Array, scale: jax.Array, named: Any) -> jax.Array:
    return quantized_matmul(x, codes, scale, bits=bits, group=group, **named)


def _in_pool(function: Callable[..., Any], operands: tuple[Any, ...], pool: tuple[Any, Any], *places: Any) -> Any:
    pages, scales = pool
    return function(*operands, pages, *places, scales=scales)
