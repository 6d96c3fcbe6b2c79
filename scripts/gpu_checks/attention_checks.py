"""Checks of ragged paged attention: formats, head dims, groups, page sizes, options and mixes of lengths."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import make_work_list, paged_attention
from pallas_kernels.paged_attention.cases import AttentionShape, pairwise_shapes
from scripts.gpu_checks import references
from scripts.gpu_checks.check import Check, Ratios
from scripts.gpu_checks.tolerance import attention_tolerance, relative_error, worst_row_error

Rows = tuple[tuple[int, int], ...]
"""(cached, new) positions of each row."""

DECODES: Rows = ((0, 1), (14, 1), (15, 1), (16, 1), (63, 1), (200, 1), (0, 0), (511, 1))
MIXED: Rows = ((700, 1), (0, 70), (15, 1), (0, 0), (33, 17), (100, 3), (0, 1))
PROMPTS: Rows = ((0, 300), (64, 130), (5, 1))
ONE_LONG: Rows = (*((7, 1),) * 40, (3999, 1), *((0, 1),) * 23)
TREES: Rows = ((40, 5), (0, 3), (17, 1), (130, 8))
TINY: Rows = ((5, 1), (0, 3), (16, 1))
PADDING = 3
"""Tokens of a step that belong to no row."""


@dataclass(frozen=True)
class Paged:
    """A step: `dtype` of the queries, `pool` of the pages ("" for the queries'), rows of (cached, new) positions."""

    rows: Rows
    dtype: str = "bfloat16"
    pool: str = ""
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    tree: bool = False
    label: str = ""

    @property
    def pool_dtype(self) -> Any:
        return jnp.dtype(self.pool or self.dtype)

    @property
    def name(self) -> str:
        pool = "int4" if self.pool == "uint8" else str(self.pool_dtype)
        shape = f"K{self.kv_heads} G{self.group} H{self.head_dim} S{self.page_size}"
        flags = [f"{name} {value}" for name in ("window", "softcap") if (value := getattr(self, name)) is not None]
        return " ".join([self.label, self.dtype, pool, shape, *flags])

    @property
    def kernel(self) -> str:
        """Options apart: the timed calls have none."""
        options = " with options" if self.window or self.softcap or self.tree or self.dtype != "bfloat16" else ""
        return f"paged_attention {self.pool_dtype}{options}"

    @cached_property
    def query_start(self) -> np.ndarray:
        return np.cumsum([0, *(new for _, new in self.rows)]).astype(np.int32)

    @property
    def num_tokens(self) -> int:
        """T: a decode step has no room for padding, so that it is one for the kernel too."""
        total = int(self.query_start[-1])
        return max(total, len(self.rows)) if all(new <= 1 for _, new in self.rows) else total + PADDING

    @property
    def contexts(self) -> np.ndarray:
        return np.array([cached + new for cached, new in self.rows], np.int32)


def _shapes() -> list[Paged]:
    formats = ("int8", "float8_e4m3fn", "float8_e5m2", "uint8")
    shapes = [Paged(DECODES, label="decode"), Paged(MIXED, label="mixed"), Paged(PROMPTS, label="prompts")]
    shapes += [Paged(DECODES, pool=pool, label="decode") for pool in formats]
    shapes += [Paged(PROMPTS, pool=pool, label="prompts") for pool in formats]
    shapes += [Paged(ONE_LONG, group=8, label="one long"), Paged(ONE_LONG, pool="int8", page_size=64, label="one long")]
    shapes += [Paged(rows, window=48, label=label) for rows, label in ((DECODES, "decode"), (PROMPTS, "prompts"))]
    shapes += [Paged(DECODES, softcap=30.0, group=8, label="decode"), Paged(TREES, tree=True, label="trees")]
    return shapes + [_from_shape(shape, index) for index, shape in enumerate(pairwise_shapes())]


def _from_shape(shape: AttentionShape, index: int) -> Paged:
    """One of the shapes in which every two properties meet; every third is a decode."""
    rows, label = (TREES, "trees") if shape.tree else (DECODES, "decode") if index % 3 == 0 else (MIXED, "mixed")
    return Paged(
        rows,
        shape.dtype,
        "" if shape.pages_dtype == shape.dtype else shape.pages_dtype,
        shape.num_kv_heads,
        shape.group,
        shape.head_dim,
        shape.page_size,
        shape.window,
        shape.softcap,
        shape.tree,
        label,
    )


REHEARSAL = (
    Paged(TINY, head_dim=32, label="tiny"),
    Paged(TINY, dtype="float32", pool="int8", head_dim=16, group=2, window=9, label="tiny"),
    Paged(((6, 3), (0, 4)), dtype="float32", head_dim=16, group=1, tree=True, label="tiny trees"),
)


def checks(implementation: str | None, rehearse: bool) -> list[Check]:
    """Every shape, the most important first."""
    return [_check(paged, implementation) for paged in (REHEARSAL if rehearse else _shapes())]


def _check(paged: Paged, implementation: str | None) -> Check:
    rng = np.random.default_rng([paged.num_tokens, paged.head_dim, paged.group])
    q = rng.standard_normal((paged.num_tokens, paged.kv_heads * paged.group, paged.head_dim))
    q = (2 * q).astype(jnp.dtype(paged.dtype))
    tables, pages, scales = _pool(paged, rng)
    tree_mask = _tree_mask(paged, rng) if paged.tree else None

    def run(q: Any, pages: Any, tables: Any, query_start: Any, contexts: Any, scales: Any, tree_mask: Any) -> jax.Array:
        work_list = make_work_list(
            query_start,
            contexts,
            num_tokens=q.shape[0],
            num_heads=q.shape[1],
            num_kv_heads=paged.kv_heads,
            head_dim=paged.head_dim,
            window=paged.window,
            implementation=implementation,
        )
        return paged_attention(
            q,
            pages,
            tables,
            query_start,
            contexts,
            scales=scales,
            window=paged.window,
            softcap=paged.softcap,
            tree_mask=tree_mask,
            work_list=work_list,
            implementation=implementation,
        )

    def judge(out: Any) -> Ratios:
        expected = _expected(paged, q.astype(np.float64), tables, pages, scales, tree_mask)
        owned = int(paged.query_start[-1])
        pair, tolerance = (out[:owned].astype(np.float64), expected[:owned]), attention_tolerance(paged.dtype)
        return {
            "out": relative_error(*pair) / tolerance,
            "worst row": worst_row_error(*pair) / (2 * tolerance),
            "padding": 0.0 if not out[owned:].any() else float("inf"),
        }

    args = (q, pages, tables, paged.query_start, paged.contexts, scales, tree_mask)
    return Check(f"paged_attention {paged.name}", paged.kernel, run, args, judge)


def _pool(paged: Paged, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Block tables, pages and scales. What no token may see is NaN: unused pages and the ends of last pages."""
    size = paged.page_size
    counts = -(-paged.contexts // size)
    total = 1 + int(counts.sum()) + 2
    ids = 1 + rng.permutation(total - 1)
    tables = np.zeros((len(paged.rows), max(int(counts.max()), 1)), np.int32)
    channels = paged.head_dim // 2 if paged.pool == "uint8" else paged.head_dim
    shape = (total, 2 * paged.kv_heads, size, channels)
    if paged.pool == "uint8":
        low, high = (rng.integers(-7, 8, shape) & 0xF for _ in range(2))
        pages = (low | high << 4).astype(np.uint8)
    else:
        values = rng.integers(-127, 128, shape) if paged.pool == "int8" else rng.standard_normal(shape)
        pages = values.astype(paged.pool_dtype)
    scales = rng.uniform(0.5, 1.5, shape[:3]).astype(np.float32) if paged.pool else None
    if scales is not None:
        scales /= {"int8": 64.0, "uint8": 4.0}.get(paged.pool, 1.0)
    unseen = np.ones((total, size), bool)
    for row, (count, context) in enumerate(zip(counts, paged.contexts, strict=True)):
        tables[row, :count], ids = ids[:count], ids[count:]
        for index, page in enumerate(tables[row, :count]):
            unseen[page, : min(size, context - index * size)] = False
    _spoil(pages if scales is None else scales, unseen)
    return tables, pages, scales


def _spoil(array: np.ndarray, unseen: np.ndarray) -> None:
    np.moveaxis(array, 2, 1)[unseen] = np.nan


def _tree_mask(paged: Paged, rng: np.random.Generator) -> np.ndarray:
    """bool[T, Qmax]: every token sees itself and the ancestors of a random earlier one."""
    widest = max(new for _, new in paged.rows)
    mask = np.zeros((paged.num_tokens, widest), bool)
    for row, (_, new) in enumerate(paged.rows):
        first = paged.query_start[row]
        for j in range(new):
            if j:
                mask[first + j] = mask[first + rng.integers(j)]
            mask[first + j, j] = True
    return mask


def _expected(
    paged: Paged,
    q: np.ndarray,
    tables: np.ndarray,
    pages: np.ndarray,
    scales: np.ndarray | None,
    tree_mask: np.ndarray | None,
) -> np.ndarray:
    contexts = []
    for table, length in zip(tables, paged.contexts, strict=True):
        values = references.dequantized(pages[table], None if scales is None else scales[table])
        flat = values.transpose(1, 0, 2, 3).reshape(2 * paged.kv_heads, -1, paged.head_dim)[:, :length]
        contexts.append(np.stack([flat[0::2], flat[1::2]]))
    masking = references.Masking(paged.head_dim**-0.5, paged.window, paged.softcap)
    return references.paged_attention(q, contexts, paged.query_start, masking, tree_mask)
