"""Named shapes of real models, a pairwise selection of all that the operation can do, and operands for them.

Shared by tests, audits and benchmarks.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_format import FORMATS, format_of, quantize

Rows = Sequence[tuple[int, int]]
"""(new tokens, context length) of each row of a step."""

SELF_CHECK_ROWS: Rows = ((1, 300), (0, 0), (40, 70), (3, 17), (50, 90))


@dataclass(frozen=True)
class AttentionShape:
    """What `paged_attention` is compiled for, the sizes of the step aside.

    Attributes:
        num_heads, num_kv_heads, head_dim, page_size: N, K, H, S.
        dtype: of the queries.
        pages_dtype: of the pool; uint8 for int4.
        window, softcap: as in `paged_attention`.
        tree: whether there is a tree mask.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    dtype: str = "bfloat16"
    pages_dtype: str = "bfloat16"
    window: int | None = None
    softcap: float | None = None
    tree: bool = False

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def options(self) -> dict[str, Any]:
        """The static arguments of `paged_attention`."""
        return {"window": self.window, "softcap": self.softcap}

    def pages_shape(self, num_pages: int) -> tuple[int, int, int, int]:
        """Of a pool."""
        width = self.head_dim // 2 if self.pages_dtype == "uint8" else self.head_dim
        return num_pages, 2 * self.num_kv_heads, self.page_size, width

    def __str__(self) -> str:
        parts = [f"{self.num_heads}:{self.num_kv_heads}", f"h{self.head_dim}", f"page{self.page_size}", self.dtype]
        kv_format = format_of(self.pages_dtype)
        parts += [kv_format.name] if kv_format else []
        parts += [f"window{self.window}"] if self.window else []
        parts += [f"cap{self.softcap:g}"] if self.softcap else []
        return "-".join(parts + ["tree"] * self.tree)


MODELS: Mapping[str, AttentionShape] = MappingProxyType(
    {
        "llama-3-8b": AttentionShape(32, 8, 128),
        "llama-3-70b": AttentionShape(64, 8, 128),
        "llama-3.1-405b": AttentionShape(128, 8, 128),
        "llama-2-7b": AttentionShape(32, 32, 128),
        "qwen2.5-0.5b": AttentionShape(14, 2, 64),
        "qwen2.5-1.5b": AttentionShape(12, 2, 128),
        "qwen2.5-7b": AttentionShape(28, 4, 128),
        "qwen2.5-14b": AttentionShape(40, 8, 128),
        "smollm2-135m": AttentionShape(9, 3, 64, dtype="float32", pages_dtype="float32"),
        "mistral-7b": AttentionShape(32, 8, 128, window=4096),
        "mistral-large": AttentionShape(96, 8, 128),
        "starcoder2-7b": AttentionShape(36, 4, 128, window=4096),
        "gemma-2b": AttentionShape(8, 1, 256),
        "gemma-2-2b": AttentionShape(8, 4, 256, softcap=50.0),
        "gemma-2-2b-window": AttentionShape(8, 4, 256, window=4096, softcap=50.0),
        "phi-2": AttentionShape(32, 32, 80, dtype="float16", pages_dtype="float16"),
        "phi-3-mini": AttentionShape(32, 32, 96, window=2047),
    }
)
"""One layer of each; bfloat16, pages of 16."""

AXES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "head_dim": (64, 80, 96, 128, 256),
        "group": (1, 3, 4, 7, 8, 16),
        "page_size": (16, 32, 64, 128),
        "dtype": ("float32", "bfloat16", "float16"),
        "kv_format": (None, *(kv_format.name for kv_format in FORMATS)),
        "window": (None, 20),
        "softcap": (None, 2.0),
        "tree": (False, True),
    }
)
"""What `pairwise_shapes` combines; the window and the cap are small so that small inputs feel them."""


def pairwise_shapes(num_kv_heads: int = 2) -> tuple[AttentionShape, ...]:
    """Shapes among which every two values of different `AXES` meet: about 35 where all combinations are 28,800."""
    formats = {kv_format.name: str(kv_format.dtype) for kv_format in FORMATS}
    return tuple(
        AttentionShape(
            num_heads=values["group"] * num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=values["head_dim"],
            page_size=values["page_size"],
            dtype=values["dtype"],
            pages_dtype=formats.get(values["kv_format"], values["dtype"]),
            window=values["window"],
            softcap=values["softcap"],
            tree=values["tree"],
        )
        for values in _pairwise(AXES)
    )


def _pairwise(axes: Mapping[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Greedily: a pick starts from a pair not met yet and takes of each further axis what meets the most new ones."""
    names = list(axes)
    missing = {
        frozenset([(a, i), (b, j)])
        for a, b in itertools.combinations(names, 2)
        for i, j in itertools.product(range(len(axes[a])), range(len(axes[b])))
    }
    while missing:
        picked = dict(min(missing, key=sorted))
        for name in names:
            if name not in picked:
                gains = [
                    sum(frozenset([(name, index), other]) in missing for other in picked.items())
                    for index in range(len(axes[name]))
                ]
                picked[name] = gains.index(max(gains))
        missing -= {frozenset(pair) for pair in itertools.combinations(picked.items(), 2)}
        yield {name: axes[name][picked[name]] for name in names}


def make_operands(
    shape: AttentionShape,
    rows: Rows,
    *,
    num_tokens: int | None = None,
    num_rows: int | None = None,
    pages_per_row: int | None = None,
    num_pages: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """The array arguments of `paged_attention` for a step, random, with each row's pages scattered over the pool.

    Args:
        shape: of the layer.
        rows: of the step.
        num_tokens, num_rows, pages_per_row, num_pages: T, B, M, P where they are to be more than the rows need.
        seed: of the numbers.
    """
    rng = np.random.default_rng(seed)
    new, context = (np.array([row[part] for row in rows], np.int32) for part in (0, 1))
    needed = -(-context // shape.page_size)
    num_tokens, num_rows = num_tokens or int(new.sum()), num_rows or len(rows)
    num_pages = num_pages or int(needed.sum()) + 1
    ids = iter(rng.permutation(np.arange(1, num_pages)))
    tables = np.zeros((num_rows, pages_per_row or max(int(needed.max()), 1)), np.int32)
    for row, count in enumerate(needed):
        tables[row, :count] = [next(ids) for _ in range(count)]
    pool = rng.standard_normal((*shape.pages_shape(num_pages)[:3], shape.head_dim), np.float32)
    kv_format = format_of(shape.pages_dtype)
    pages, scales = (
        quantize(jnp.asarray(pool), kv_format) if kv_format else (jnp.asarray(pool, shape.pages_dtype), None)
    )
    padding = num_rows - len(rows)
    return {
        "q": jnp.asarray(rng.standard_normal((num_tokens, shape.num_heads, shape.head_dim), np.float32), shape.dtype),
        "pages": pages,
        "block_tables": jnp.asarray(tables),
        "query_start": jnp.asarray(np.pad(np.cumsum(np.append(0, new)), (0, padding), mode="edge"), jnp.int32),
        "context_lens": jnp.asarray(np.pad(context, (0, padding)), jnp.int32),
        "scales": scales,
        "tree_mask": _random_trees(rng, new, num_tokens) if shape.tree else None,
    }


def _random_trees(rng: np.random.Generator, new: np.ndarray, num_tokens: int) -> jax.Array:
    """bool[T, Qmax]: each row's tokens are a random tree, and each sees the path from its root to itself. Where several
    rows have some tokens, the longest is no tree, as a chunk of a prompt beside trees."""
    *_, second, longest = sorted([0, 0, *new.tolist()])
    mask = np.zeros((num_tokens, max(second if second > 1 else longest, 1)), bool)
    first = 0
    for count in new:
        for node in range(count if count <= mask.shape[1] else 0):
            if node:
                mask[first + node] = mask[first + rng.integers(node)]
            mask[first + node, node] = True
        first += count
    return jnp.asarray(mask)


def abstract_operands(
    shape: AttentionShape, *, num_tokens: int, num_rows: int, pages_per_row: int, num_pages: int, tree_width: int = 64
) -> dict[str, Any]:
    """The same as `make_operands` without numbers, for compiling: T, B, M, P and Qmax."""
    as_array = jax.ShapeDtypeStruct
    pages_shape = shape.pages_shape(num_pages)
    return {
        "q": as_array((num_tokens, shape.num_heads, shape.head_dim), shape.dtype),
        "pages": as_array(pages_shape, shape.pages_dtype),
        "block_tables": as_array((num_rows, pages_per_row), jnp.int32),
        "query_start": as_array((num_rows + 1,), jnp.int32),
        "context_lens": as_array((num_rows,), jnp.int32),
        "scales": as_array(pages_shape[:3], jnp.float32) if format_of(shape.pages_dtype) else None,
        "tree_mask": as_array((num_tokens, tree_width), jnp.bool_) if shape.tree else None,
    }
