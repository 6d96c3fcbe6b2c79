"""Checks of the product whose weights stay packed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantized_matmul import quantized_matmul
from scripts.gpu_checks.check import Check, Ratios
from scripts.gpu_checks.tolerance import UNIT_ROUNDOFF, relative_error, worst_row_error


@dataclass(frozen=True)
class Quantized:
    """M tokens of K channels to N; `kind` is what there is beside the scale: "", "offset" or "table"."""

    tokens: int
    channels: int
    out: int
    bits: int = 4
    group: int = 128
    kind: str = "offset"
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        sizes = f"M{self.tokens} {self.channels} to {self.out}"
        return f"quantized_matmul {sizes} {self.bits} bits group {self.group} {self.kind or 'scale'} {self.dtype}"


SHAPES = (
    Quantized(1, 4096, 1024),
    Quantized(16, 4096, 1000),
    Quantized(300, 2048, 1000),
    Quantized(16, 2048, 1024, group=64, kind="table"),
    Quantized(300, 2048, 1024, group=64, kind="table"),
    Quantized(5, 2048, 1024, 8, 32, ""),
    Quantized(64, 2048, 1024, 8, 32, ""),
    Quantized(32, 896, 1000, group=32),
    Quantized(8, 1024, 500, group=1024),
    Quantized(128, 1024, 500, group=1024),
    Quantized(16, 1024, 512, group=64, dtype="float16"),
    Quantized(16, 1024, 512, group=64, kind="table", dtype="float16"),
    Quantized(16, 1024, 512, 8, 128, "offset", "float16"),
    Quantized(16, 1024, 512, 8, 1024, ""),
)
REHEARSAL = (Quantized(3, 64, 40, group=32), Quantized(33, 64, 40, 8, 32, ""))


def checks(implementation: str | None, rehearse: bool) -> list[Check]:
    """Every shape."""
    return [_check(quantized, implementation) for quantized in (REHEARSAL if rehearse else SHAPES)]


def _check(quantized: Quantized, implementation: str | None) -> Check:
    bits, group, kind = quantized.bits, quantized.group, quantized.kind
    rng = np.random.default_rng([quantized.tokens, quantized.channels, quantized.out])
    x = rng.standard_normal((quantized.tokens, quantized.channels)).astype(jnp.dtype(quantized.dtype))
    groups = (quantized.out, quantized.channels // group)
    values = rng.integers(*((0, 16) if bits == 4 else (-128, 128)), (quantized.out, quantized.channels))
    codes = (values[:, 0::2] | values[:, 1::2] << 4).astype(np.uint8) if bits == 4 else values.astype(np.int8)
    scale = rng.uniform(-1, 1, groups).astype(np.float32)
    offset = rng.uniform(-8, 8, groups).astype(np.float32) if kind == "offset" else None
    table = rng.uniform(-1, 1, 16).astype(np.float32) if kind == "table" else None
    function = partial(quantized_matmul, bits=bits, group=group, implementation=implementation)

    def run(x: Any, codes: Any, scale: Any, offset: Any, table: Any) -> jax.Array:
        return function(x, codes, scale, offset=offset, codebook=table)

    def judge(result: Any) -> Ratios:
        weights = (values if table is None else table[values]) * np.repeat(scale.astype(np.float64), group, axis=1)
        if offset is not None:
            weights = weights + np.repeat(offset, group, axis=1)
        pair = result.astype(np.float64), x.astype(np.float64) @ weights.T
        # The weights or the table's entries are rounded once, and so is the result.
        tolerance = 2 * UNIT_ROUNDOFF[quantized.dtype]
        return {"out": relative_error(*pair) / tolerance, "worst row": worst_row_error(*pair) / (2 * tolerance)}

    return Check(quantized.name, "quantized_matmul", run, (x, codes, scale, offset, table), judge)
