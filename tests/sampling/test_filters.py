"""min-p, top-k and top-p against plain definitions by sorting."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxinfer.sampling.logits import keep_candidates, order_bits

keep_jitted = jax.jit(keep_candidates)


def keep(logits, top_k=0, top_p=1.0, min_p=0.0):
    """bool[V] of one row, as the code under test sees it."""
    row = np.asarray(logits, np.float32)[None]
    arrays = [np.asarray([value], dtype) for value, dtype in ((top_k, "int32"), (top_p, "float32"), (min_p, "float32"))]
    out = np.asarray(keep_jitted(row, *arrays, np.ones(1, bool)))[0]
    kept = out > -np.inf
    assert np.array_equal(out[kept], row[0][kept])
    return kept


def softmax(logits):
    shifted = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return shifted / shifted.sum()


def top_k_by_sort(logits, k):
    return logits >= np.sort(logits)[::-1][min(k, len(logits)) - 1]


def top_p_by_sort(logits, p, kept):
    """Adds tokens from the most likely one on until the mass is reached; then those equal to the last."""
    probs = np.where(kept, softmax(logits), 0.0)
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    needed = int(np.searchsorted(np.cumsum(probs[order]), p - 1e-12)) + 1
    return kept & (logits >= logits[order[min(needed, len(order)) - 1]])


ANY_MAGNITUDE = st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False)
HALVES = st.integers(-40, 40).map(lambda n: np.float32(n / 2))


@settings(max_examples=150, deadline=None)
@given(hnp.arrays(np.float32, 23, elements=HALVES), st.integers(1, 30))
def test_top_k_keeps_the_k_largest_and_ties(logits, k):
    assert np.array_equal(keep(logits, top_k=k), top_k_by_sort(logits, k))


@settings(max_examples=150, deadline=None)
@given(hnp.arrays(np.float32, 23, elements=ANY_MAGNITUDE), st.integers(1, 23))
def test_top_k_of_any_magnitude(logits, k):
    assert np.array_equal(keep(logits, top_k=k), top_k_by_sort(logits, k))


@settings(max_examples=150, deadline=None)
@given(
    hnp.arrays(np.float32, 23, elements=HALVES.map(lambda x: x / 4)),
    st.sampled_from([0.013, 0.1, 0.333, 0.5, 0.777, 0.9, 0.99]),
    st.integers(0, 23),
)
def test_top_p_of_what_top_k_leaves(logits, p, k):
    kept = top_k_by_sort(logits, k) if k else np.ones(23, bool)
    expected = top_p_by_sort(logits, p, kept)
    found = keep(logits, top_k=k, top_p=p)
    if not np.array_equal(found, expected):  # a mass within rounding of p may go either way
        share = softmax(logits)[found].sum() / softmax(logits)[kept].sum()
        assert abs(share - p) < 1e-5 or abs(softmax(logits)[expected].sum() / softmax(logits)[kept].sum() - p) < 1e-5


@settings(max_examples=100, deadline=None)
@given(hnp.arrays(np.float32, 23, elements=HALVES), st.sampled_from([1e-6, 0.01, 0.2, 0.61, 1.0]))
def test_min_p_is_relative_to_the_best(logits, min_p):
    assert np.array_equal(keep(logits, min_p=min_p), softmax(logits) >= min_p * softmax(logits).max() * (1 - 1e-6))


def test_top_p_of_the_mass_that_min_p_leaves():
    """Of 0.4, 0.3, 0.2 and crumbs: 0.4 is 57 % of what min_p=0.7 leaves but only 40 % of the whole."""
    logits = np.log(np.asarray([0.4, 0.3, 0.2, 0.05, 0.05]))
    assert keep(logits, top_p=0.55).tolist() == [True, True, False, False, False]
    assert keep(logits, top_p=0.55, min_p=0.7).tolist() == [True, False, False, False, False]


def test_uniform_rows_keep_every_tie():
    assert keep(np.zeros(9), top_k=1).all()
    assert keep(np.zeros(9), top_p=0.1).all()


def test_off_values_keep_everything():
    logits = np.asarray([3.0, -np.inf, 0.0, -80.0])
    for settings_ in ({}, {"top_k": 4}, {"top_k": 10**6}, {"top_k": 0}, {"top_p": 1.0}):
        assert keep(logits, **settings_).tolist() == [True, False, True, True]


def test_top_k_counts_only_what_bans_leave():
    logits = np.asarray([-np.inf, 2.0, -np.inf, 1.0, 0.0])
    assert keep(logits, top_k=2).tolist() == [False, True, False, True, False]
    assert keep(logits, top_k=4).tolist() == [False, True, False, True, True]


@pytest.mark.parametrize("p", [1e-9, 1e-3, 0.999999, np.nextafter(np.float32(1), np.float32(0))])
def test_extreme_top_p_keeps_the_best(p):
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    kept = keep(logits, top_p=p)
    assert kept[logits.argmax()]
    assert kept.sum() == 1 if p < 0.01 else kept.sum() > 990


def test_filters_of_one_row_leave_the_others_alone():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(4, 50)).astype(np.float32) * 3
    out = np.asarray(
        keep_jitted(
            logits,
            np.asarray([0, 3, 0, 7], "int32"),
            np.asarray([1.0, 1.0, 0.5, 1.0], "float32"),
            np.zeros(4, "float32"),
            np.asarray([True, True, True, False]),
        )
    )
    assert np.array_equal(out[0], logits[0])
    assert (out[1] > -np.inf).sum() == 3
    assert np.array_equal(out[2] > -np.inf, keep(logits[2], top_p=0.5))
    assert np.array_equal(out[3], logits[3])


def test_order_bits_orders_like_floats():
    values = np.asarray([-np.inf, -3e38, -1.0, -2e-38, -0.0, 0.0, 2e-38, 0.5, 1.0, 3e38, np.inf], np.float32)
    bits = np.asarray(order_bits(values)).astype(np.int64)
    assert bits[4] == bits[5]
    steps = np.delete(np.diff(bits), 4)
    assert (steps > 0).all()
