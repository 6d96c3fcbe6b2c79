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


@dataclass(frozen=True)
class Layered:
    """T tokens of a gated layer: norm, rounding to the codes' dtype if `rounds`, two products, gate."""

    tokens: int
    channels: int
    out: int
    codes: str
    group: int
    rounds: bool = False
    ordered: bool = False

    @property
    def name(self) -> str:
        words = " rounded" * self.rounds + " ordered" * self.ordered
        sizes = f"M{self.tokens} {self.channels} to 2 x {self.out}"
        return f"quantized_matmul, norm and gate {sizes} {self.codes} group {self.group}{words}"


LAYERED = (
    Layered(16, 1024, 528, "uint8", 128),
    Layered(32, 1024, 528, "uint8", 64, ordered=True),
    Layered(5, 1024, 528, "float8_e4m3fn", 128),
    Layered(16, 1024, 528, "int8", 1024, rounds=True),
    Layered(16, 1024, 528, "float8_e4m3fn", 1024, rounds=True),
)
LAYERED_REHEARSAL = (Layered(3, 64, 40, "float8_e4m3fn", 32), Layered(3, 64, 40, "int8", 64, rounds=True))


def checks(implementation: str | None, rehearse: bool) -> list[Check]:
    """Every shape."""
    plain, layered = (REHEARSAL, LAYERED_REHEARSAL) if rehearse else (SHAPES, LAYERED)
    return [_check(quantized, implementation) for quantized in plain] + [
        _layered_check(case, implementation) for case in layered
    ]


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


def _layered_check(case: Layered, implementation: str | None) -> Check:
    rng = np.random.default_rng([case.tokens, case.group])
    rows, groups = 2 * case.out, (2 * case.out, case.channels // case.group)
    codes = rng.integers(0, 256, (rows, case.channels // (2 if case.codes == "uint8" else 1))).astype(np.uint8)
    if case.codes == "float8_e4m3fn":
        codes = np.where((codes & 0x7F) == 0x7F, np.uint8(0), codes)  # NaN
    values = np.stack([codes & 15, codes >> 4], axis=2).reshape(rows, -1) if case.codes == "uint8" else None
    stored = codes.view(jnp.dtype(case.codes))
    wide = (stored if values is None else values).astype(np.float64)
    scale = (rng.uniform(0.5, 1, groups) / (wide.std() * case.channels**0.5)).astype(np.float32)
    x = rng.standard_normal((case.tokens, case.channels)).astype(jnp.bfloat16)
    norm = rng.uniform(0.5, 2, case.channels).astype(jnp.bfloat16)
    order = rng.permutation(case.channels).astype(np.int32) if case.ordered else None
    function = partial(
        quantized_matmul,
        bits=4 if case.codes == "uint8" else 8,
        group=case.group,
        epsilon=1e-5,
        activation="silu",
        act_dtype=case.codes if case.rounds else None,
        implementation=implementation,
    )

    def run(x: Any, codes: Any, scale: Any, norm: Any, order: Any) -> jax.Array:
        result: jax.Array = function(x, codes, scale, norm=norm, order=order)
        return result

    def judge(result: Any) -> Ratios:
        weights = wide * np.repeat(scale.astype(np.float64), case.group, axis=1)
        exact = x.astype(np.float64)
        exact = exact / np.sqrt(np.mean(exact**2, axis=1, keepdims=True) + 1e-5) * norm.astype(np.float64)
        if case.rounds:
            step = np.abs(exact).max(1, keepdims=True) / (127 if case.codes == "int8" else 448)
            grid = exact / step
            near = np.rint(grid) if case.codes == "int8" else grid.astype(np.float32).astype(jnp.float8_e4m3fn)
            exact = near.astype(np.float64) * step
        if order is not None:
            exact = exact[:, order]
        gate, up = np.split(exact @ weights.T, 2, axis=1)
        expected = gate / (1 + np.exp(-gate)) * up
        # Normed rows are rounded to bfloat16 on the way; a code may be the neighbour of the one expected.
        tolerance = 8 * UNIT_ROUNDOFF["bfloat16"]
        if case.rounds:
            tolerance += {"int8": 1 / 127, "float8_e4m3fn": 1 / 16}[case.codes]
        return {"out": relative_error(result.astype(np.float64), expected) / tolerance}

    return Check(case.name, "quantized_matmul", run, (x, stored, scale, norm, order), judge)
