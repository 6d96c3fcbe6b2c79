"""Ragged paged attention in numbers: the specification and every implementation against float64, token by token.

What must not matter is poisoned: pages nobody names, the ends of pages behind a row's last position, positions that
have left every window. Floats are NaN there, codes are random, and scales are NaN.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import make_work_list, paged_attention
from pallas_kernels.paged_attention.cases import AttentionShape, make_operands, pairwise_shapes

EVERY = ("reference", "xla", "triton-interpret")
FAST = EVERY[1:]
SMALL = AttentionShape(4, 2, 16, dtype="float32", pages_dtype="float32")
UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}

FLOAT8 = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)

Operands = dict[str, Any]
Rows = Sequence[tuple[int, int]]

STATIC = ("implementation", "scale", "window", "softcap")
optimized = jax.jit(paged_attention, static_argnames=STATIC)

# What is interpreted is a long program that runs briefly: optimising it takes most of the time.
QUICK = {"xla_backend_optimization_level": 0}
unoptimized = jax.jit(paged_attention, static_argnames=STATIC, compiler_options=QUICK)
slow = partial(pytest.param, marks=pytest.mark.slow)


def attend(implementation: str, **arguments: Any) -> jax.Array:
    """`paged_attention`, compiled."""
    run = unoptimized if implementation == "triton-interpret" else optimized
    return run(**arguments, implementation=implementation)


class Exact(NamedTuple):
    """In float64, [T, N, H] both; 0 for tokens that see nothing.

    Attributes:
        out: the result.
        bound: how far from `out` a correct kernel may be.
    """

    out: np.ndarray
    bound: np.ndarray


def visible_positions(ops: Operands, window: int | None) -> Iterator[tuple[int, int, list[int]]]:
    """Row, token, and the positions it sees."""
    starts, trees = np.asarray(ops["query_start"]), ops["tree_mask"]
    for row, context in enumerate(np.asarray(ops["context_lens"])):
        first, end = starts[row], starts[row + 1]
        mask = trees if trees is not None and end - first <= trees.shape[1] else None
        cached = context - (end - first)
        for token in range(first, end):
            if mask is None:
                here = cached + token - first
                new = range(cached, here + 1)
            else:
                new = [cached + j for j in range(end - first) if mask[token, j]]
                here = cached + max(len(new) - 1, 0)
            low = 0 if window is None else max(here - window + 1, 0)
            kept = new if mask is not None else [position for position in new if position >= low]
            yield row, token, [*range(low, cached), *kept]


def decoded(ops: Operands) -> np.ndarray:
    """The pool in float64, as [P, 2K, S, H]."""
    pages = np.asarray(ops["pages"])
    if pages.dtype == np.uint8:
        signed = np.stack([pages & 15, pages >> 4], axis=-1).reshape(*pages.shape[:-1], -1).astype(np.int8)
        pages = np.where(signed > 7, signed - 16, signed)
    values = pages.astype(np.float64)
    return values if ops["scales"] is None else values * np.asarray(ops["scales"], np.float64)[..., None]


def by_hand(
    ops: Operands, *, scale: float | None = None, window: int | None = None, softcap: float | None = None
) -> Exact:
    """The result, token by token, and how far rounding may move it.

    A logit is a float32 sum over H channels. Its partial sums grow with sqrt(H), and the sum of their rounding errors
    with sqrt(H) once more: H roundoffs of a typical term, or one of the sum of the terms' magnitudes; the cap adds
    those of tanh. An error d of the logits changes weights by a factor of 1 + d, in numerator and denominator, and so
    the result by 2 d times the mean of |values|. The sum over L positions adds sqrt(L) roundoffs of float32. Weights
    are rounded to the dtype of the product with the values: the queries', or bfloat16 for the codes of float16 queries,
    whose scales are beyond float16. At last the result is rounded to the queries' dtype. The factor of 4 is the safety
    of a statistical bound over some 10^4 results.
    """
    q, pool, tables = np.asarray(ops["q"]).astype(np.float64), decoded(ops), np.asarray(ops["block_tables"])
    group, page_size = 2 * q.shape[1] // pool.shape[1], pool.shape[2]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    out, mean, moved = np.zeros_like(q), np.zeros_like(q), np.zeros_like(q)
    for row, token, seen in visible_positions(ops, window):
        if not seen:
            continue
        where = np.array(seen)
        stored = pool[tables[row, where // page_size], :, where % page_size]  # [L, 2K, H]
        keys, values = stored[:, 0::2].repeat(group, axis=1), stored[:, 1::2].repeat(group, axis=1)
        logits = np.einsum("nh,lnh->nl", q[token], keys) * scale
        size = np.einsum("nh,lnh->nl", np.abs(q[token]), np.abs(keys)).max(1, keepdims=True) * abs(scale)
        if softcap is not None:
            logits, size = softcap * np.tanh(logits / softcap), size + softcap
        weights = np.exp(logits - logits.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        out[token] = np.einsum("nl,lnh->nh", weights, values)
        mean[token] = np.einsum("nl,lnh->nh", weights, np.abs(values))
        moved[token] = 2 * size + np.sqrt(len(seen))
    dtype = str(ops["q"].dtype)
    roundoff = UNIT_ROUNDOFF[dtype]
    of_weights = UNIT_ROUNDOFF["bfloat16"] if dtype == "float16" and ops["scales"] is not None else roundoff
    bound = roundoff * np.abs(out) + (of_weights + 4 * UNIT_ROUNDOFF["float32"] * moved) * mean
    return Exact(out, bound)


def poisoned(ops: Operands, window: int | None = None) -> Operands:
    """The same step, with whatever is not written or has left every window replaced by the worst."""
    pages = np.array(ops["pages"])
    seen = np.zeros((pages.shape[0], pages.shape[2]), bool)
    tables, page_size = np.asarray(ops["block_tables"]), pages.shape[2]
    starts = np.asarray(ops["query_start"])
    for row, context in enumerate(np.asarray(ops["context_lens"])):
        cached = context - (starts[row + 1] - starts[row])
        low = 0 if window is None else max(cached - window + 1, 0)
        where = np.arange(low, context if cached < context else low)
        seen[tables[row, where // page_size], where % page_size] = True
    hidden = np.broadcast_to(~seen[:, None, :], pages.shape[:3])
    if ops["scales"] is None:
        pages[hidden] = np.nan
        return {**ops, "pages": jnp.asarray(pages)}
    bits = np.random.default_rng(0).integers(0, 256, pages.shape, np.uint8).view(pages.dtype)
    pages[hidden] = np.nan if pages.dtype in FLOAT8 else bits[hidden]
    return {**ops, "pages": jnp.asarray(pages), "scales": jnp.where(hidden, jnp.nan, ops["scales"])}


def check(
    ops: Operands,
    implementation: str,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> np.ndarray:
    """Runs the poisoned step against the exact one; returns the result."""
    exact = by_hand(ops, scale=scale, window=window, softcap=softcap)
    dirty = poisoned(ops, window)
    out = attend(**dirty, scale=scale, window=window, softcap=softcap, implementation=implementation)
    assert out.dtype == ops["q"].dtype and out.shape == ops["q"].shape
    result = np.asarray(out)
    error = np.abs(result.astype(np.float64) - exact.out)
    assert not np.isnan(error).any(), f"NaN in tokens {sorted(set(np.argwhere(np.isnan(error))[:, 0].tolist()))}"
    worst = np.unravel_index(np.argmax(error - exact.bound), error.shape)
    assert (error <= exact.bound).all(), f"{error[worst]:.3g} at {worst}, where {exact.bound[worst]:.3g} is allowed"
    return result


MIXED: Rows = [(1, 70), (0, 0), (5, 33), (1, 1), (0, 12), (20, 20), (1, 16)]


SHAPES = pairwise_shapes()
INTERPRETED_ALWAYS = 6
INTERPRETED = [
    (pytest.param if index < INTERPRETED_ALWAYS else slow)(shape, "triton-interpret", id=f"{shape}-interpret")
    for index, shape in enumerate(SHAPES)
]


@pytest.mark.parametrize(
    ("shape", "implementation"), [*[pytest.param(s, "xla", id=f"{s}-xla") for s in SHAPES], *INTERPRETED]
)
def test_every_pair_of_features(shape: AttentionShape, implementation: str) -> None:
    ops = make_operands(shape, MIXED, num_tokens=32, num_rows=8, pages_per_row=6)
    check(ops, implementation, window=shape.window, softcap=shape.softcap)


@pytest.mark.parametrize(
    ("group", "implementation"),
    [
        *itertools.product((2, 5, 6, 9, 12), ["xla"]),
        *itertools.starmap(slow, itertools.product((10, 11, 13, 14, 15), ["xla"])),
        *itertools.product((5, 12), ["triton-interpret"]),
        *itertools.starmap(slow, itertools.product((2, 6, 9, 15), ["triton-interpret"])),
    ],
)
def test_group_sizes_that_the_pairs_leave_out(group: int, implementation: str) -> None:
    shape = AttentionShape(2 * group, 2, 16, dtype="float32", pages_dtype="float32")
    check(make_operands(shape, MIXED, num_tokens=32, num_rows=8, pages_per_row=6), implementation)


# What each length class at the edges of pages and chunks meets: contexts of S - 1, S, S + 1 for one and for several
# pages, and of one kernel chunk.
EDGES = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
STEPS: dict[str, Rows] = {
    "decodes at every edge": [(min(1, context), context) for context in EDGES],
    "two tokens at every edge": [(min(2, context), context) for context in EDGES],
    "prompts that end at edges": [(new, new) for new in (1, 15, 16, 17, 0, 31, 1)],
    "chunks that begin at edges": [(5, 5 + cached) for cached in (15, 16, 17, 63, 64, 65, 0)],
    "one chunk of all tokens": [(96, 129)],
    "a chunk among decodes": [(1, 129), (1, 1), (40, 100), (0, 0), (1, 64), (0, 50), (17, 17)],
    "nothing at all": [(0, 0)],
}


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_ragged_steps(rows: Rows, implementation: str) -> None:
    check(ragged(rows), implementation)


def ragged(rows: Rows, seed: int = 0) -> Operands:
    """Of one size, so that each implementation compiles once: T 96, B 16, M 9, P 80."""
    return make_operands(SMALL, rows, num_tokens=96, num_rows=16, pages_per_row=9, num_pages=80, seed=seed)


@pytest.mark.parametrize("implementation", FAST)
def test_as_many_tokens_as_rows(implementation: str) -> None:
    """A step that holds decodes only, whose tiles are smaller."""
    ops = make_operands(SMALL, [(min(1, context), context) for context in EDGES], num_tokens=16, num_rows=16)
    check(ops, implementation)


@pytest.mark.parametrize("implementation", FAST)
def test_one_long_row_among_many_of_one(implementation: str) -> None:
    shape = AttentionShape(4, 1, 32, dtype="bfloat16", pages_dtype="bfloat16")
    check(make_operands(shape, [*[(1, 1)] * 10, (1, 4000), *[(1, 1)] * 5]), implementation)


@pytest.mark.parametrize("window", [1, 17, 64, slow(2), slow(16), slow(1000)])
def test_windows(window: int) -> None:
    for rows in (STEPS["a chunk among decodes"], STEPS["decodes at every edge"], STEPS["one chunk of all tokens"]):
        check(ragged(rows), "xla", window=window)


@pytest.mark.parametrize("window", [17, slow(1)])
def test_windows_interpreted(window: int) -> None:
    for rows in (STEPS["a chunk among decodes"], STEPS["decodes at every edge"], STEPS["one chunk of all tokens"]):
        check(ragged(rows), "triton-interpret", window=window)


@pytest.mark.parametrize("implementation", FAST)
def test_a_window_passes_over_a_long_context(implementation: str) -> None:
    check(make_operands(SMALL, [(1, 4000), (1, 30), (3, 2000)], num_tokens=5), implementation, window=100)


@pytest.mark.parametrize(
    ("scale", "softcap", "implementation"),
    [(0.0, None, "xla"), (4.0, 0.5, "xla"), *[(-1.0, 30.0, implementation) for implementation in EVERY]],
)
def test_scales_and_caps(scale: float, softcap: float | None, implementation: str) -> None:
    check(ragged(STEPS["a chunk among decodes"]), implementation, scale=scale, softcap=softcap)


@pytest.mark.parametrize(
    ("dtype", "implementation"), [("bfloat16", "xla"), ("float16", "xla"), ("float16", "triton-interpret")]
)
def test_logits_beyond_float16(dtype: str, implementation: str) -> None:
    shape = AttentionShape(4, 2, 64, dtype=dtype, pages_dtype=dtype)
    ops = make_operands(shape, STEPS["a chunk among decodes"])
    check({**ops, "q": ops["q"] * 100, "pages": ops["pages"] * 100}, implementation, scale=1.0)


@pytest.mark.parametrize("implementation", EVERY)
def test_rows_may_share_pages(implementation: str) -> None:
    """Row 2 has all pages of row 0's first 64 positions, and row 6 those of row 4."""
    ops = ragged(STEPS["a chunk among decodes"])
    tables = np.array(ops["block_tables"])
    tables[2, :4], tables[6, :1] = tables[0, :4], tables[4, :1]
    check({**ops, "block_tables": jnp.asarray(tables)}, implementation)


@pytest.mark.parametrize(
    ("pages_dtype", "implementation"),
    [
        *itertools.product(("float32", "float8_e5m2", "uint8"), ("reference", "xla")),
        ("float32", "triton-interpret"),
        slow("int8", "triton-interpret"),
    ],
)
def test_a_nan_key_reaches_those_who_see_it_and_nobody_else(pages_dtype: str, implementation: str) -> None:
    """As `kv_write` leaves one, with a value of 0: at position 80 of row 2, whose tokens begin at 60."""
    shape = AttentionShape(4, 2, 16, dtype="float32", pages_dtype=pages_dtype)
    ops = poisoned(make_operands(shape, STEPS["a chunk among decodes"], num_tokens=64))
    clean = np.asarray(attend(**ops, implementation=implementation))
    assert not np.isnan(clean).any()
    page, slot = int(ops["block_tables"][2, 5]), 0
    pages, scales = np.array(ops["pages"]), ops["scales"]
    pages[page, 1, slot] = 0
    if scales is None:
        pages[page, 0, slot] = np.nan
    else:
        scales = scales.at[page, 0, slot].set(jnp.nan)
    out = np.asarray(attend(**{**ops, "pages": jnp.asarray(pages), "scales": scales}, implementation=implementation))
    sees = np.zeros(out.shape, bool)
    sees[2 + 20 : 2 + 40, :2] = True  # the query heads of the first KV head
    assert np.isnan(out[sees]).all()
    np.testing.assert_array_equal(out[~sees], clean[~sees])


@pytest.mark.parametrize("width", [45, 17])
@pytest.mark.parametrize(
    ("window", "implementation"),
    [(None, "reference"), (3, "reference"), (None, "xla"), (3, "xla"), (3, "triton-interpret")],
)
def test_any_mask_among_new_tokens(window: int | None, implementation: str, width: int) -> None:
    """Not only trees: some tokens see none of the new ones, what lies past the row's tokens does not count, and rows
    longer than the mask is wide are no trees."""
    ops = ragged(STEPS["a chunk among decodes"])
    ops["tree_mask"] = jnp.asarray(np.random.default_rng(1).random((96, width)) < 0.3).at[2:6].set(False)
    ops["tree_mask"] = ops["tree_mask"].at[44].set(False)  # the first token of a row with nothing cached
    out = check(ops, implementation, window=window)
    assert not out[44].any()


@pytest.mark.parametrize("window", [None, 3])
def test_masks_in_a_step_of_as_many_tokens_as_rows(window: int | None) -> None:
    """A few trees and many rows without tokens: tiles are of one token."""
    ops = make_operands(SMALL, [(5, 20), (1, 9), (3, 3)] + [(0, 0)] * 7, num_tokens=9)
    ops["tree_mask"] = jnp.asarray(np.random.default_rng(1).random((9, 5)) < 0.4)
    check(ops, "xla", window=window)


step_rows = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 120)), min_size=1, max_size=8)


@settings(max_examples=25, deadline=None)
@given(step_rows, st.sampled_from([None, 20]), st.integers(0, 3))
def test_any_ragged_step(rows: Rows, window: int | None, seed: int) -> None:
    check(ragged([(new, new + cached) for new, cached in rows], seed), "xla", window=window)


@settings(max_examples=4, deadline=None)
@given(step_rows, st.integers(0, 3))
def test_any_ragged_step_interpreted(rows: Rows, seed: int) -> None:
    check(ragged([(new, new + cached) for new, cached in rows], seed), "triton-interpret")


# Decodes at the contexts of JAX's own test of its paged attention for GPUs, over its pages, heads, groups and formats.
JAX_CONTEXTS = (3, 256, 513, 1023, 2048)
JAX_SHAPES = (
    AttentionShape(2, 1, 32, 8, dtype="float16", pages_dtype="float16"),
    AttentionShape(32, 2, 64, 16, dtype="float16", pages_dtype="float16"),
    AttentionShape(40, 2, 32, 32, dtype="float16", pages_dtype="float16"),
    AttentionShape(32, 2, 32, 8, dtype="float16", pages_dtype="int8"),
    AttentionShape(2, 1, 64, 16, dtype="float16", pages_dtype="float8_e5m2"),
    AttentionShape(16, 1, 64, 32, dtype="float16", pages_dtype="float8_e4m3fn"),
)


@pytest.mark.parametrize("implementation", ["xla", slow("triton-interpret")])
@pytest.mark.parametrize("shape", JAX_SHAPES, ids=str)
def test_decodes_that_jax_tests(shape: AttentionShape, implementation: str) -> None:
    ops = make_operands(shape, [(1, context) for context in JAX_CONTEXTS])
    if shape.group > 16 and implementation != "xla":
        with pytest.raises(NotImplementedError, match="at most 16"):
            attend(**ops, implementation=implementation)
        return
    check(ops, implementation)


@pytest.mark.parametrize("implementation", FAST)
def test_one_work_list_serves_every_layer(implementation: str) -> None:
    layers = [ragged(STEPS["a chunk among decodes"], seed) for seed in (0, 1)]
    starts, contexts = layers[0]["query_start"], layers[0]["context_lens"]

    @partial(jax.jit, static_argnames="window", compiler_options=QUICK)
    def both(layers: list[Operands], window: int | None) -> list[jax.Array]:
        sizes = {"num_tokens": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
        work = make_work_list(starts, contexts, **sizes, window=window, implementation=implementation)
        return [paged_attention(**ops, window=window, work_list=work) for ops in layers]

    for ops, out in zip(layers, both(layers, 17), strict=True):
        exact = by_hand(ops, window=17)
        assert (np.abs(out - exact.out) <= exact.bound).all()
