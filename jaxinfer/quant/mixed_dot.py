"""Products of uint8 with int8 on the CPU.

Processors with AVX512-VNNI multiply four pairs of uint8 and int8 in an instruction, and have none for int8 with int8.
XLA's CPU backend uses it for a product of these two types; `jax.lax.dot_general` does not pass one on, but converts
both to int32 first, which is twenty times as slow. So the product is a primitive of its own here.
"""

from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir, xla

LONGEST_ROW = (2**31 - 1) // (255 * 128)
"""Up to so many products the sum is an int32 whatever the values."""

mixed_dot_p = Primitive("mixed_dot")
mixed_dot_p.def_impl(partial(xla.apply_primitive, mixed_dot_p))


def mixed_dot(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """``x[T, K] . matrix[N, K]^T`` of uint8 and int8, int32 `[T, N]`.

    Both are taken as they lie in memory, row after row: with another layout, which XLA is free to choose for what it
    computes itself, its fast product would be refused.
    """
    result: jax.Array = mixed_dot_p.bind(_rows_in_memory(x), matrix)
    return _rows_in_memory(result)


@cache
def is_fast() -> bool:
    """Whether this machine's processor has an instruction for it (AVX512-VNNI), by Linux's list of its features."""
    features = Path("/proc/cpuinfo")
    return features.exists() and "avx512_vnni" in features.read_text()


def _rows_in_memory(x: jax.Array) -> jax.Array:
    return lax.optimization_barrier(x.reshape(-1)).reshape(x.shape)


@mixed_dot_p.def_abstract_eval
def _result(x: Any, matrix: Any) -> Any:
    return jax.core.ShapedArray((x.shape[0], matrix.shape[0]), jnp.int32)


def _lowered(context: Any, x: Any, matrix: Any) -> list[Any]:
    (result,) = context.avals_out
    numbers = stablehlo.DotDimensionNumbers.get(
        lhs_batching_dimensions=[],
        rhs_batching_dimensions=[],
        lhs_contracting_dimensions=[1],
        rhs_contracting_dimensions=[1],
    )
    kind = ir.RankedTensorType.get(result.shape, ir.IntegerType.get_signless(32))
    return [stablehlo.dot_general(kind, x, matrix, numbers)]


mlir.register_lowering(mixed_dot_p, _lowered, platform="cpu")
