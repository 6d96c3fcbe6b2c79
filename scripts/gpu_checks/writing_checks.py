"""Checks of the kernels that write into pages: `kv_write`, `rope_kv_write` and `block_copy`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_copy import block_copy
from pallas_kernels.kv_write import kv_write, rope_kv_write
from scripts.gpu_checks import references
from scripts.gpu_checks.check import Check, Ratios
from scripts.gpu_checks.tolerance import UNIT_ROUNDOFF, relative_error

PAGES, PAGE_SIZE = 40, 16
STEPS = {"int8": 0.5, "uint8": 0.5}
"""Largest error of an integer code, in units of the scale."""

ROUNDOFFS = {"float8_e4m3fn": (2.0**-4, 2.0**-10), "float8_e5m2": (2.0**-3, 2.0**-17)}
"""Of a float8 code: relative, and in units of the scale where it is subnormal."""

SLACK = 1.01
"""The scale and the quotient are rounded to float32 before the code is."""


@dataclass(frozen=True)
class Write:
    """T tokens written to a pool of `pool` (a dtype's name; "" is the tokens' own). One token has a NaN."""

    pool: str = ""
    dtype: str = "bfloat16"
    tokens: int = 33
    kv_heads: int = 4
    group: int = 4
    head_dim: int = 128
    rotated: int = 128

    @property
    def pool_dtype(self) -> Any:
        return jnp.dtype(self.pool or self.dtype)

    @property
    def name(self) -> str:
        pool = "int4" if self.pool == "uint8" else str(self.pool_dtype)
        return f"{self.dtype} to {pool} T{self.tokens} G{self.group} H{self.head_dim} R{self.rotated}"


SHAPES = (
    Write(),
    Write("int8"),
    Write("float8_e4m3fn"),
    Write("float8_e5m2", "float16", group=1, head_dim=64, rotated=64),
    Write("uint8", group=8),
    Write("", "float32", tokens=5, head_dim=80, rotated=80),
    Write("int8", tokens=300, head_dim=96, rotated=48),
    Write("", "bfloat16", tokens=256, kv_heads=8, head_dim=256, rotated=256),
)
REHEARSAL = (Write(tokens=3, head_dim=16, rotated=16), Write("int8", "float32", 4, 2, 2, 16, 8))


def checks(implementation: str | None, rehearse: bool) -> list[Check]:
    """The three operations on every shape."""
    shapes = REHEARSAL if rehearse else SHAPES
    return [make(write, implementation) for write in shapes for make in (_rope_kv_write, _kv_write, _block_copy)]


def _values(write: Write) -> tuple[np.ndarray, ...]:
    """qkv, cos, sin, page ids, offsets. Each page is written once; the last token has a NaN in its first key."""
    rng = np.random.default_rng([write.tokens, write.head_dim, write.group])
    shape = (write.tokens, write.kv_heads, write.group + 2, write.head_dim)
    qkv = rng.standard_normal(shape).astype(jnp.dtype(write.dtype))
    qkv[-1, 0, write.group, 0] = np.nan
    angles = rng.uniform(0, 1000, (write.tokens, write.rotated // 2))
    places = rng.permutation(np.arange(PAGE_SIZE, PAGES * PAGE_SIZE))[: write.tokens]
    page_ids, offsets = (places // PAGE_SIZE).astype(np.int32), (places % PAGE_SIZE).astype(np.int32)
    return qkv, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), page_ids, offsets


def _pool(write: Write) -> tuple[np.ndarray, np.ndarray | None]:
    """Random pages, so that what must not be written is seen to be as it was."""
    rng = np.random.default_rng(0)
    channels = write.head_dim // 2 if write.pool == "uint8" else write.head_dim
    shape = (PAGES, 2 * write.kv_heads, PAGE_SIZE, channels)
    values = rng.integers(0, 7, shape) if write.pool_dtype.kind in "iu" else rng.standard_normal(shape)
    scales = rng.uniform(0.5, 1, shape[:3]).astype(np.float32) if write.pool else None
    return values.astype(write.pool_dtype), scales


def _rope_kv_write(write: Write, implementation: str | None) -> Check:
    qkv, cos, sin, page_ids, offsets = _values(write)
    pages, scales = _pool(write)

    def run(*args: Any) -> Any:
        *operands, scales = args
        return rope_kv_write(*operands, scales=scales, implementation=implementation)

    def judge(results: Any) -> Ratios:
        q, *pool = results
        wide = qkv.astype(np.float64)
        turned = references.rotated(wide[:, :, : write.group + 1], cos.astype(np.float64), sin.astype(np.float64))
        queries = turned[:, :, : write.group].reshape(q.shape)
        # float32 rotation, then one rounding.
        tolerance = UNIT_ROUNDOFF[write.dtype] * (4 if write.dtype == "float32" else 1.01)
        error = relative_error(q.astype(np.float64), queries) / tolerance
        written = _judge_pool(write, pool, turned[:, :, write.group], wide[:, :, write.group + 1], tolerance)
        return {"q": error} | written

    args = (qkv, cos, sin, pages, page_ids, offsets, scales)
    return Check(f"rope_kv_write {write.name}", f"rope_kv_write {write.pool_dtype}", run, args, judge)


def _kv_write(write: Write, implementation: str | None) -> Check:
    qkv, _, _, page_ids, offsets = _values(write)
    k, v = qkv[:, :, write.group], qkv[:, :, write.group + 1]
    pages, scales = _pool(write)

    def run(*args: Any) -> Any:
        *operands, scales = args
        return kv_write(*operands, scales=scales, implementation=implementation)

    def judge(results: Any) -> Ratios:
        pool = results if isinstance(results, (tuple, list)) else [results]
        return _judge_pool(write, pool, k.astype(np.float64), v.astype(np.float64), 0.0)

    args = (k, v, pages, page_ids, offsets, scales)
    return Check(f"kv_write {write.name}", f"kv_write {write.pool_dtype}", run, args, judge)


def _judge_pool(write: Write, pool: Any, k: np.ndarray, v: np.ndarray, input_error: float) -> Ratios:
    """Of the pages after ``k[T, K, H]`` and ``v`` were written, known up to a relative `input_error`."""
    _, _, _, page_ids, offsets = _values(write)
    before, scales_before = _pool(write)
    pages, scales = pool[0], pool[1] if len(pool) > 1 else None
    values = references.dequantized(
        pages[page_ids, :, offsets], None if scales is None else scales[page_ids, :, offsets]
    )
    keys, mixed = values[:, 0::2], values[:, 1::2]
    untouched = np.ones(pages.shape[::2][:2], bool)
    untouched[page_ids, offsets] = False
    same = _same(pages, before, untouched) and (scales is None or _same(scales, scales_before, untouched))
    broken = ~np.isfinite(k).all(-1)
    marked = np.isnan(keys[broken]).all() and not mixed[broken].any()
    return {
        "key": _worst(write, keys[~broken], k[~broken], input_error),
        "value": _worst(write, mixed[~broken], v[~broken], 0.0),
        "other places": 0.0 if same else float("inf"),
        "the NaN token": 0.0 if marked else float("inf"),
    }


def _same(after: np.ndarray, before: np.ndarray | None, places: np.ndarray) -> bool:
    assert before is not None
    return np.moveaxis(after, 2, 1)[places].tobytes() == np.moveaxis(before, 2, 1)[places].tobytes()


def _worst(write: Write, stored: np.ndarray, wanted: np.ndarray, input_error: float) -> float:
    """Largest error over what one rounding may do."""
    amax = np.abs(wanted).max(-1, keepdims=True)
    bound = input_error * amax + 1e-6 * amax
    if write.pool:
        step = amax / references.LIMITS[write.pool]
        relative, absolute = ROUNDOFFS.get(write.pool, (0.0, STEPS.get(write.pool, 0.0)))
        bound = bound + SLACK * np.maximum(relative * np.abs(wanted), absolute * step) + input_error * step
    error = np.abs(stored - wanted)
    return float(np.max(error / bound)) if np.isfinite(error).all() else float("inf")


def _block_copy(write: Write, implementation: str | None) -> Check:
    pages, scales = _pool(write)
    sources, targets = np.array([3, 7, 0, 3, 0], np.int32), np.array([9, 2, 0, 30, 0], np.int32)

    def run(pages: Any, scales: Any) -> Any:
        pairs = jnp.asarray(sources), jnp.asarray(targets)
        return block_copy(pages, *pairs, scales=scales, implementation=implementation)

    def judge(results: Any) -> Ratios:
        pool = results if isinstance(results, (tuple, list)) else [results]
        ratios = {}
        for name, after, before in zip(("pages", "scales"), pool, (pages, scales), strict=False):
            assert before is not None
            expected = before.copy()
            expected[targets] = before[sources]
            # Page 0 may hold anything.
            ratios[name] = 0.0 if after[1:].tobytes() == expected[1:].tobytes() else float("inf")
        return ratios

    return Check(f"block_copy {write.name}", f"block_copy {write.pool_dtype}", run, (pages, scales), judge)
