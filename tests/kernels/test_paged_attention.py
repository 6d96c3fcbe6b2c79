"""Ragged paged attention: the specification against a loop in numpy, every implementation against the specification."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.work_list import PREFILL_TILE, make_tiles


class Case(NamedTuple):
    """A ragged step: T tokens padded, and (new tokens, context) of each row."""

    num_tokens: int
    rows: Sequence[tuple[int, int]]
    padding_rows: int = 0
    heads: tuple[int, int] = (6, 2)
    head_dim: int = 8
    page_size: int = 4
    table_width: int = 40


CASES = {
    "one token": Case(1, [(1, 1)]),
    "decodes of different length": Case(8, [(1, 5), (1, 150), (1, 33), (1, 128)], padding_rows=4),
    "a prompt": Case(64, [(60, 60)], padding_rows=3),
    "a late chunk": Case(48, [(33, 140)], padding_rows=1),
    "everything at once": Case(64, [(1, 129), (1, 1), (3, 17), (17, 17), (20, 90)], padding_rows=3),
    "more rows than a block": Case(32, [(1, 7 * i + 1) for i in range(20)], padding_rows=12),
    "multi-query": Case(16, [(5, 9), (1, 30)], heads=(4, 1)),
    "multi-head": Case(16, [(5, 9), (1, 30)], heads=(3, 3)),
    "chunk in a batch of decodes": Case(16, [(1, 40), (9, 50), (2, 2)], padding_rows=13),
}


def operands(case: Case, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    num_heads, kv_heads = case.heads
    needed = [-(-context // case.page_size) for _, context in case.rows]
    num_pages = sum(needed) + 3
    free = iter(rng.permutation(num_pages - 1) + 1)
    count = len(case.rows) + case.padding_rows
    tables, contexts = np.zeros((count, case.table_width), np.int32), np.zeros(count, np.int32)
    starts = np.zeros(count + 1, np.int32)
    for row, ((new, context), blocks) in enumerate(zip(case.rows, needed, strict=True)):
        tables[row, :blocks] = [next(free) for _ in range(blocks)]
        contexts[row] = context
        starts[row + 1 :] = starts[row] + new
    return {
        "q": rng.standard_normal((case.num_tokens, num_heads, case.head_dim)).astype(np.float32),
        "pages": rng.standard_normal((num_pages, 2 * kv_heads, case.page_size, case.head_dim)).astype(np.float32),
        "block_tables": tables,
        "query_start": starts,
        "context_lens": contexts,
    }


def by_hand(ops: dict[str, Any], tree_mask: np.ndarray | None = None) -> np.ndarray:
    """Token by token, head by head, in float64."""
    q, pages = ops["q"].astype(np.float64), ops["pages"].astype(np.float64)
    page_size, group = pages.shape[2], q.shape[1] // (pages.shape[1] // 2)
    out = np.zeros_like(q)
    for row, context in enumerate(ops["context_lens"]):
        first, end = ops["query_start"][row : row + 2]
        cached = context - (end - first)
        for token in range(first, end):
            seen = list(range(cached + token - first + 1))
            if tree_mask is not None:
                seen = [*range(cached), *(cached + j for j in range(end - first) if tree_mask[token, j])]
            where = [(ops["block_tables"][row, j // page_size], j % page_size) for j in seen]
            for head in range(q.shape[1]):
                keys = np.array([pages[page, 2 * (head // group), slot] for page, slot in where])
                values = np.array([pages[page, 2 * (head // group) + 1, slot] for page, slot in where])
                logits = keys @ q[token, head] / np.sqrt(q.shape[2])
                weights = np.exp(logits - logits.max())
                out[token, head] = weights @ values / weights.sum()
    return out


@pytest.fixture(scope="module")
def attend() -> Callable[..., np.ndarray]:
    """Attention through jit, by implementation."""
    jitted = jax.jit(paged_attention, static_argnames=("implementation", "scale"))
    return lambda **arguments: np.asarray(jitted(**arguments))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_a_loop_over_tokens(case: Case, implementation: str, attend: Callable[..., np.ndarray]) -> None:
    ops = operands(case)
    out = attend(**ops, implementation=implementation)
    np.testing.assert_allclose(out, by_hand(ops), atol=2e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", ["chunk in a batch of decodes", "everything at once"])
def test_tree_mask_replaces_causality_among_new_tokens(
    name: str, implementation: str, attend: Callable[..., np.ndarray]
) -> None:
    case = CASES[name]
    ops = operands(case)
    mask = np.random.default_rng(1).random((case.num_tokens, max(new for new, _ in case.rows))) < 0.4
    for row, (new, _) in enumerate(case.rows):
        for j in range(new):
            mask[ops["query_start"][row] + j, j] = True
    out = attend(**ops, tree_mask=mask, implementation=implementation)
    np.testing.assert_allclose(out, by_hand(ops, mask), atol=2e-6)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_ragged_step(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 120)), min_size=1, max_size=6))
    case = Case(256, [(new, new + cached) for new, cached in rows], padding_rows=8 - len(rows))
    ops = operands(case, seed=data.draw(st.integers(0, 3)))
    out, expected = (jitted_attention(**ops, implementation=name) for name in ("xla", "reference"))
    np.testing.assert_allclose(out, expected, atol=2e-6)


jitted_attention = jax.jit(paged_attention, static_argnames=("implementation",))


def test_a_row_does_not_depend_on_its_neighbours(attend: Callable[..., np.ndarray]) -> None:
    together = operands(CASES["more rows than a block"])
    out = attend(**together)
    for row in (0, 7, 19):
        alone = dict(together)
        alone["query_start"] = np.zeros_like(together["query_start"])
        alone["query_start"][1:] = 1
        alone["q"] = np.roll(together["q"], -row, axis=0)
        alone["block_tables"] = np.roll(together["block_tables"], -row, axis=0)
        alone["context_lens"] = np.zeros_like(together["context_lens"])
        alone["context_lens"][0] = together["context_lens"][row]
        np.testing.assert_array_equal(attend(**alone)[0], out[row])


def test_pages_nobody_names_are_not_read(attend: Callable[..., np.ndarray]) -> None:
    ops = operands(CASES["everything at once"])
    named = set(ops["block_tables"].ravel().tolist()) | {0}
    clean = attend(**ops)
    spoilt = ops["pages"].copy()
    spoilt[[page for page in range(len(spoilt)) if page not in named]] = np.nan
    np.testing.assert_array_equal(attend(**{**ops, "pages": spoilt}), clean)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_nan_key_reaches_those_who_see_it_and_nobody_else(
    implementation: str, attend: Callable[..., np.ndarray]
) -> None:
    """Row 4 writes NaN at its position 80; the sink and the stale end of a page are NaN throughout."""
    ops = operands(CASES["everything at once"])
    clean = attend(**ops, implementation=implementation)
    pages = ops["pages"].copy()
    tables, lengths = ops["block_tables"].tolist(), ops["context_lens"].tolist()
    written = {(tables[row][j // 4], j % 4) for row in range(5) for j in range(lengths[row])}
    stale = [(page, slot) for page in range(len(pages)) for slot in range(4) if (page, slot) not in written]
    for page, slot in [*stale, (tables[4][20], 0)]:
        pages[page, 0::2, slot], pages[page, 1::2, slot] = np.nan, 0.0
    out = attend(**{**ops, "pages": pages}, implementation=implementation)
    first = ops["query_start"][4] + 10  # its 20 new tokens start at position 70
    end = ops["query_start"][5]
    assert np.isnan(out[first:end]).all()
    np.testing.assert_array_equal(np.delete(out, np.s_[first:end], 0), np.delete(clean, np.s_[first:end], 0))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_stays_close_to_float32(dtype: Any, attend: Callable[..., np.ndarray]) -> None:
    ops = operands(CASES["everything at once"])
    half = {**ops, "q": jnp.asarray(ops["q"], dtype), "pages": jnp.asarray(ops["pages"], dtype)}
    out = attend(**half)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(np.float32), by_hand(ops), atol=0.03)


def test_work_list_names_every_token_once_and_the_longest_first() -> None:
    case = CASES["everything at once"]
    ops = operands(case)
    work = make_tiles(jnp.asarray(ops["query_start"]), jnp.asarray(ops["context_lens"]), case.num_tokens)
    count = int(work.num_tiles)
    tokens = np.asarray(work.tokens)[:count][np.asarray(work.valid)[:count]]
    assert sorted(tokens) == list(range(sum(new for new, _ in case.rows)))
    assert not np.asarray(work.valid)[count:].any()
    assert count == sum(-(-new // PREFILL_TILE) for new, _ in case.rows)
    rows = np.asarray(work.rows)[:count]
    ends = np.where(np.asarray(work.valid)[:count], np.asarray(work.tokens)[:count], -1).max(1) + 1
    reach = ops["context_lens"][rows] - (ops["query_start"][rows + 1] - ends)
    assert list(reach) == sorted(reach, reverse=True)


def test_bad_shapes_are_refused_by_name() -> None:
    ops = operands(CASES["a prompt"])
    with pytest.raises(ValueError, match="context_lens"):
        paged_attention(**{**ops, "context_lens": ops["context_lens"][:1]})
    with pytest.raises(ValueError, match="same H"):
        paged_attention(**{**ops, "q": ops["q"][:, :, :4]})
    with pytest.raises(ValueError, match="2K"):
        paged_attention(**{**ops, "q": ops["q"][:, :5]})
    with pytest.raises(ValueError, match="implementation='cuda' of paged_attention must be one of"):
        paged_attention(**ops, implementation="cuda")
