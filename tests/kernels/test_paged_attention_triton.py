"""The Triton kernel, interpreted, against float64: every split, tile size and format that other suites do not force.

Pools hold NaN and garbage wherever no row has a position, so that every case also shows that nothing leaks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.paged_attention.split_plan import ListPolicy, SplitPolicy, make_split_plan
from pallas_kernels.paged_attention.triton import paged_attention_triton

LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "uint8": 7.0}
ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
DECODE = SplitPolicy(ListPolicy(16, 6, 64), None)
MIXED = SplitPolicy(ListPolicy(16, 4, 64), ListPolicy(32, 3, 64))
TALL = replace(MIXED, long=ListPolicy(128, 2, 64))


@dataclass(frozen=True)
class Case:
    """A ragged step: T tokens padded, and (new tokens, context) of each row."""

    num_tokens: int
    rows: Sequence[tuple[int, int]]
    heads: tuple[int, int]
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "bfloat16"
    pages: str = ""
    window: int | None = None
    softcap: float | None = None
    tree: int = 0
    policy: SplitPolicy = DECODE
    shared_pages: int = 0
    nan_key: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Step:
    """Operands, and the same as plain float64 rows."""

    operands: dict[str, Any]
    keys: list[np.ndarray]
    values: list[np.ndarray]


def quantize(rows: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes, unpacked, and float32 scales."""
    scales = (np.abs(rows).max(-1) / LIMITS[name]).astype(np.float32)
    codes = rows / scales[..., None].astype(np.float64)
    if name.startswith("float8"):
        return codes.astype(getattr(ml_dtypes, name)), scales
    return np.rint(codes).astype(np.int8), scales


def pack(codes: np.ndarray) -> np.ndarray:
    nibbles = codes.view(np.uint8) & 15
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def make_step(case: Case, seed: int = 0) -> Step:
    rng = np.random.default_rng(seed)
    num_heads, kv_heads = case.heads
    size, name = case.page_size, case.pages or case.dtype
    packed = name == "uint8"
    needed = [-(-context // size) for _, context in case.rows]
    width = max(needed) + 1
    num_pages = sum(needed) + 3
    shape = (num_pages, 2 * kv_heads, size)
    if case.pages:
        pool: np.ndarray = rng.integers(0, 255, (*shape, case.head_dim // (2 if packed else 1)), dtype=np.uint8)
        pool = pool if packed else pool.view(getattr(ml_dtypes, name, np.int8))
        scales = np.full(shape, np.nan, np.float32)
    else:
        pool, scales = np.full((*shape, case.head_dim), np.nan, jnp.dtype(name)), None
    free = iter(rng.permutation(num_pages - 1) + 1)
    tables = np.full((len(case.rows), width), num_pages - 1, np.int32)
    starts, contexts = np.zeros(len(case.rows) + 1, np.int32), np.zeros(len(case.rows), np.int32)
    keys, values = [], []
    for row, (new, context) in enumerate(case.rows):
        tables[row, : needed[row]] = [next(free) for _ in range(needed[row])]
        contexts[row], starts[row + 1] = context, starts[row] + new
        kv = rng.standard_normal((context, 2 * kv_heads, case.head_dim)) * np.exp(rng.normal(size=(context, 1, 1)))
        if row and case.shared_pages:
            tables[row, : case.shared_pages] = tables[0, : case.shared_pages]
            kv[: case.shared_pages * size, 0::2] = keys[0][: case.shared_pages * size]
            kv[: case.shared_pages * size, 1::2] = values[0][: case.shared_pages * size]
        if case.pages:
            codes, scale = quantize(kv, name)
            if case.nan_key and case.nan_key[0] == row:
                scale[case.nan_key[1], 2 * case.nan_key[2]] = np.nan
            stored, kv = pack(codes) if packed else codes, codes.astype(np.float64) * scale[..., None]
        else:
            if case.nan_key and case.nan_key[0] == row:
                kv[case.nan_key[1], 2 * case.nan_key[2]] = np.nan
            stored = kv.astype(jnp.dtype(name))
            kv = stored.astype(np.float64)
        for position in range(context):
            page, slot = tables[row, position // size], position % size
            pool[page, :, slot] = stored[position]
            if scales is not None:
                scales[page, :, slot] = scale[position]
        keys.append(kv[:, 0::2])
        values.append(kv[:, 1::2])
    q = rng.standard_normal((case.num_tokens, num_heads, case.head_dim)).astype(jnp.dtype(case.dtype))
    tree = make_tree(case, starts, rng) if case.tree else None
    operands = {
        "q": q,
        "pages": pool,
        "block_tables": tables,
        "query_start": starts,
        "context_lens": contexts,
        "scales": scales,
        "tree_mask": tree,
    }
    return Step(operands, keys, values)


def make_tree(case: Case, starts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Paths to random parents, and a few later tokens; what lies past a row's tokens is random, and must not count."""
    mask = rng.random((case.num_tokens, case.tree)) < 0.5
    for row, (new, _) in enumerate(case.rows):
        for j in range(new):
            own = mask[starts[row] + j]
            own[:new] = False
            if j:
                own |= mask[starts[row] + rng.integers(0, j)] & (np.arange(case.tree) < new)
            own[j] = True
            own[:new] |= rng.random(new) < 0.1
    return mask


def visible(case: Case, step: Step, row: int) -> np.ndarray:
    """bool[new, context]."""
    new, context = case.rows[row]
    cached = context - new
    position = np.arange(context)[None, :]
    index = np.arange(new)[:, None]
    if step.operands["tree_mask"] is None:
        seen = position <= cached + index
        return seen if case.window is None else seen & (position > cached + index - case.window)
    start = step.operands["query_start"][row]
    mask = step.operands["tree_mask"][start : start + new, :new]
    seen = np.concatenate([np.ones((new, cached), bool), mask], axis=1)
    if case.window is not None:
        depth = mask.sum(1, keepdims=True) - 1
        seen &= (position >= cached) | (position > cached + depth - case.window)
    return seen


def by_hand(case: Case, step: Step) -> tuple[np.ndarray, np.ndarray]:
    """float64 result, and a bound on the kernel's error from its dtypes and the lengths of its sums.

    An error of a weight counts by what the weight brings in, so the bound is a multiple of the weighted ``|value|``:
    the rounding of weights to the product's dtype, twice the error of the logits, and the sums' own.
    """
    q = step.operands["q"].astype(np.float64)
    group = case.heads[0] // case.heads[1]
    out, bound = np.zeros_like(q), np.zeros_like(q)
    rounding = ROUNDOFF["bfloat16" if case.pages and case.dtype != "float32" else case.dtype]
    for row, (new, context) in enumerate(case.rows):
        mine = slice(step.operands["query_start"][row], step.operands["query_start"][row] + new)
        seen = visible(case, step, row)
        for head in range(case.heads[0]):
            keys, values = step.keys[row][:, head // group], step.values[row][:, head // group]
            logits = q[mine, head] @ keys.T / np.sqrt(case.head_dim)
            magnitude = np.nan_to_num(np.abs(q[mine, head]) @ np.abs(keys).T) / np.sqrt(case.head_dim)
            if case.softcap is not None:
                logits = case.softcap * np.tanh(logits / case.softcap)
            logits = np.where(seen, logits, -np.inf)
            weights = np.exp(logits - logits.max(-1, keepdims=True, initial=-1e300))
            weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
            out[mine, head] = weights @ values
            of_logits = 2.0**-24 * (case.head_dim + 16) * magnitude.max(initial=0.0)
            error = rounding + 2 * of_logits + 2.0**-24 * (context + 64)
            bound[mine, head] = error * (np.nan_to_num(weights) @ np.abs(values))
    return out, bound + 1.01 * ROUNDOFF[case.dtype] * np.abs(np.nan_to_num(out))


def run(case: Case, step: Step) -> np.ndarray:
    scale = case.head_dim**-0.5

    @jax.jit
    def attend(operands: dict[str, Any]) -> jax.Array:
        starts, contexts = operands["query_start"], operands["context_lens"]
        plan = make_split_plan(
            starts,
            contexts,
            num_tokens=case.num_tokens,
            group=case.heads[0] // case.heads[1],
            window=case.window,
            policy=case.policy,
        )
        return paged_attention_triton(
            **operands, scale=scale, window=case.window, softcap=case.softcap, work_list=plan, interpret=True
        )

    return np.asarray(attend(step.operands)).astype(np.float64)


def check(case: Case, seed: int = 0) -> None:
    step = make_step(case, seed)
    out = run(case, step)
    expected, bound = by_hand(case, step)
    assert np.isnan(expected).any() == (case.nan_key is not None)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
    excess = np.nan_to_num(np.abs(out - expected)) - bound
    assert excess.max() <= 0, f"off by {excess.max():.3g} more than {bound.flat[excess.argmax()]:.3g}"
    assert not out[step.operands["query_start"][-1] :].any()


EDGES = [(1, 1), (1, 15), (0, 0), (1, 16), (1, 17), (0, 40), (1, 200), (1, 31)]
MIX = [(1, 70), (5, 5), (0, 9), (17, 130), (3, 33), (20, 20)]
CASES = {
    "decode, GQA, split": Case(8, EDGES, (8, 2), head_dim=128, nan_key=(6, 100, 1)),
    "decode, MHA, a row of several": Case(8, [(1, 33), (5, 90), (0, 0), *[(0, 0)] * 5], (2, 2), dtype="float32"),
    "decode, MQA, window": Case(6, [(1, 200), (1, 5), (1, 64), *[(0, 0)] * 3], (16, 1), page_size=32, window=70),
    "decode, int8": Case(4, [(1, 1), (1, 127), (1, 129), (1, 300)], (8, 1), 128, 128, pages="int8"),
    "decode, e5m2, float16": Case(3, [(1, 90), (1, 17), (1, 64)], (4, 2), dtype="float16", pages="float8_e5m2"),
    "decode, int4": Case(3, [(1, 90), (1, 17), (1, 64)], (3, 1), 80, pages="uint8", nan_key=(1, 3, 0)),
    "mix, groups of 7": Case(56, [*MIX, (2, 1)], (14, 2), 80, dtype="float16", softcap=3.0, policy=MIXED),
    "mix, groups of 3, tall tiles by parts": Case(
        48,
        [(1, 70), (5, 5), (0, 9), (30, 130), (3, 33), (9, 20)],
        (3, 1),
        96,
        dtype="float32",
        window=50,
        policy=TALL,
        nan_key=(3, 70, 0),
    ),
    "mix, tall tiles, wide heads": Case(70, [(60, 100), (2, 70)], (3, 1), 256, 64, policy=TALL),
    "mix, e4m3": Case(48, MIX, (4, 1), dtype="float32", pages="float8_e4m3fn", policy=MIXED),
    "mix, int4": Case(48, MIX, (2, 1), pages="uint8", policy=MIXED, window=30),
    "tree": Case(48, MIX, (4, 2), dtype="float32", tree=23, policy=MIXED),
    "tree, window, int8": Case(
        40, [(7, 80), (9, 9), (1, 30), (12, 130)], (2, 2), tree=12, pages="int8", window=20, softcap=5.0, policy=MIXED
    ),
    "shared pages": Case(4, [(1, 40), (1, 33), (1, 64), (1, 48)], (2, 1), dtype="float32", shared_pages=2),
    "a long row among short ones": Case(24, [*[(1, 1)] * 9, (1, 1100), *[(1, 1)] * 9, *[(0, 0)] * 5], (4, 2)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_float64(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("pages", ["float8_e4m3fn", "uint8"])
def test_bytes_in_pairs(pages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of 2 to 4 GiB are read as int16; here every pool."""
    monkeypatch.setattr("pallas_kernels.byte_pairs.SIGNED_LIMIT", 0)
    check(replace(CASES["decode, int4"], pages=pages, head_dim=96 if pages == "uint8" else 64))
