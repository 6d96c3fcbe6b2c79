"""The sampler: what is drawn, what is flagged, what is recorded, and that neighbours never matter."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxinfer.sampling.sampler import compute_logprobs, sample, sample_greedy
from jaxinfer.sampling.state import IN_PROMPT, init_state

V = 37
C = 8
jitted = jax.jit(partial(sample, num_logprobs=4))
plain_jitted = jax.jit(sample)


def state_of(num_slots=C, vocab_size=V, **leaves):
    return init_state(num_slots, vocab_size)._replace(**{name: jnp.asarray(leaf) for name, leaf in leaves.items()})


def random_logits(num_rows, seed=0, vocab_size=V, scale=2.0):
    return (np.random.default_rng(seed).normal(size=(num_rows, vocab_size)) * scale).astype(np.float32)


def draw(logits, batch, state=None, **options):
    step = jax.jit(partial(sample, num_logprobs=4, **options)) if options else jitted
    return step(np.asarray(logits, np.float32), batch, state_of() if state is None else state)


def test_greedy_takes_the_first_of_equals(make_batch):
    logits = random_logits(3)
    logits[1, [5, 20]] = 50.0
    logits[2, :] = -1.5
    expected = [int(logits[0].argmax()), 5, 0]
    output, _ = draw(logits, make_batch(3))
    tokens, finite = sample_greedy(logits)
    assert output.tokens.tolist() == tokens.tolist() == expected
    assert finite.all() and output.finite.all() and output.allowed.all()


def test_greedy_rows_stay_exact_beside_random_ones(make_batch):
    logits = random_logits(6)
    batch = make_batch(6, temperature=[0, 1, 0, 2, 0, 0.01], seed_lo=np.arange(6), top_k=[0, 3, 0, 0, 0, 5])
    output, _ = draw(logits, batch)
    rows = [0, 2, 4, 5]  # a temperature of 0.01 leaves the best token all the mass
    assert np.asarray(output.tokens)[rows].tolist() == logits[rows].argmax(1).tolist()


@pytest.mark.parametrize(
    ("filters", "kept"),
    [({}, None), ({"temperature": 0.7}, None), ({"top_k": 3}, 3), ({"top_p": 0.6}, None), ({"min_p": 0.2}, None)],
)
def test_frequencies_follow_the_softmax(make_batch, filters, kept):
    """Chi-square of 8192 draws at successive positions against the filtered softmax in float64."""
    logits = np.asarray([1.0, 0.5, 0.0, -0.5, -1.0, -1.5, 0.25, -3.0])
    n = 8192
    values = {"temperature": 1.0} | filters
    batch = make_batch(n, slot=n, position=np.arange(n), seed_lo=11, seed_hi=7, **values)
    output, _ = draw(np.tile(logits, (n, 1)), batch, state_of(1, 8))
    probs = np.exp(logits / values["temperature"])
    probs /= probs.sum()
    order = np.argsort(-probs)
    keep = np.ones(8, bool)
    if kept:
        keep[order[kept:]] = False
    if "top_p" in filters:
        keep[order[int(np.searchsorted(np.cumsum(probs[order]), filters["top_p"])) + 1 :]] = False
    if "min_p" in filters:
        keep &= probs >= filters["min_p"] * probs.max()
    expected = np.where(keep, probs, 0) / probs[keep].sum() * n
    observed = np.bincount(np.asarray(output.tokens), minlength=8)
    assert observed[~keep].sum() == 0
    chi_square = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    assert chi_square < 30  # the 99.99 % point for 7 degrees of freedom


def test_a_row_does_not_depend_on_its_place_or_its_neighbours(make_batch):
    """Field case 2, for every batch size and row, with neighbours of every kind."""
    logits = random_logits(1, seed=3, scale=1)[0]
    state = state_of(counts=np.random.default_rng(4).integers(0, 3, (C, V)).astype(np.int32))
    mine = {"temperature": 0.8, "top_p": 0.95, "seed_lo": 42, "child_index": 1}
    positions = range(12)
    alone = [int(draw(logits[None], make_batch(1, position=p, **mine), state)[0].tokens[0]) for p in positions]
    assert len(set(alone)) > 3
    rng = np.random.default_rng(5)
    for size, place in ((2, 0), (2, 1), (3, 1), (8, 0), (8, 7)):
        for p in positions:
            values = {
                "temperature": rng.choice([0, 0.5, 1.3], size),
                "top_k": rng.choice([0, 1, 5], size),
                "top_p": rng.choice([1.0, 0.4], size),
                "seed_lo": rng.integers(0, 2**32, size),
                "child_index": rng.integers(0, 3, size),
                "position": rng.integers(0, 99, size),
                "use_counts": rng.integers(0, 2, size),
                "want_logprobs": rng.integers(0, 2, size),
                "repetition_penalty": rng.choice([1.0, 1.7], size),
            }
            plain = {"top_k": 0, "use_counts": 0, "want_logprobs": 0, "repetition_penalty": 1.0}
            for name, value in (plain | mine | {"position": p}).items():
                values[name][place] = value
            block = random_logits(size, seed=p)
            block[place] = logits
            output, _ = draw(block, make_batch(size, **values), state)
            assert int(output.tokens[place]) == alone[p]


@pytest.mark.parametrize("num_rows", [1, 8, 12, 19])
def test_rows_are_the_same_however_they_are_divided_into_blocks(make_batch, num_rows):
    values = {"temperature": [0.9, 0.0], "top_k": [0, 0, 4], "top_p": [1.0, 1.0, 1.0, 0.7], "min_p": [0.0] * 4 + [0.1]}
    mixed = {name: np.resize(value, num_rows) for name, value in values.items()}
    logits = random_logits(num_rows)
    slots, seeds = np.arange(num_rows), np.arange(num_rows) + 5
    together, _ = draw(logits, make_batch(num_rows, slot=slots, seed_lo=seeds, **mixed), state_of(num_rows))
    for row in range(num_rows):
        own = {name: value[row] for name, value in mixed.items()}
        alone, _ = draw(logits[row : row + 1], make_batch(1, slot=row, seed_lo=seeds[row], **own), state_of(num_rows))
        assert alone.tokens[0] == together.tokens[row]


def test_seed_zero_and_high_bits_are_real_seeds(make_batch):
    logits = np.tile(random_logits(1, scale=0.1), (4, 1))
    batch = partial(make_batch, 4, temperature=1.0, seed_lo=[0, 1, 0, 0], seed_hi=[0, 0, 1, 2**31])
    sequences = np.stack([np.asarray(draw(logits, batch(position=p))[0].tokens) for p in range(12)], axis=1)
    assert len({tuple(row) for row in sequences.tolist()}) == 4


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_bad_rows_are_flagged_and_neighbours_are_untouched(make_batch, temperature):
    logits = random_logits(6)
    batch = make_batch(6, temperature=temperature, top_k=5, top_p=0.9, want_logprobs=1, seed_lo=9)
    clean, _ = draw(logits, batch)
    broken = logits.copy()
    broken[1, 3] = np.nan
    broken[2, :] = np.nan
    broken[3, 30] = np.inf
    broken[4, 0] = -np.inf
    output, _ = draw(broken, batch)
    assert output.finite.tolist() == [True, False, False, False, False, True]
    assert sample_greedy(broken)[1].tolist() == output.finite.tolist()
    for found, expected in zip(jax.tree.leaves(output), jax.tree.leaves(clean), strict=True):
        assert np.array_equal(np.asarray(found)[[0, 5]], np.asarray(expected)[[0, 5]])
    assert ((np.asarray(output.tokens) >= 0) & (np.asarray(output.tokens) < V)).all()


def test_huge_but_finite_logits_are_fine(make_batch):
    logits = np.full((2, V), -3e38, np.float32)
    logits[:, 7] = 3e38
    output, _ = draw(logits, make_batch(2, temperature=[0, 1.0], top_p=0.9))
    assert output.tokens.tolist() == [7, 7]
    assert output.finite.all() and output.allowed.all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_bans_and_allow_lists(make_batch, temperature):
    bias = np.zeros((C, V), np.float32)
    bias[0] = -np.inf
    bias[0, 11] = 0.0  # only 11 is allowed
    bias[1, 4] = 100.0
    bias[2] = -np.inf  # nothing is
    logits = random_logits(4)
    batch = make_batch(4, temperature=temperature, use_bias=[1, 1, 1, 0], top_k=2, top_p=0.8, min_p=0.01)
    output, _ = draw(logits, batch, state_of(bias=bias))
    assert output.tokens[:2].tolist() == [11, 4]
    assert output.allowed.tolist() == [True, True, False, True]
    assert output.finite.all()


def test_padding_and_scored_rows_write_nothing(make_batch):
    before = state_of(last_tokens=np.full(C, 99, np.int32), counts=np.full((C, V), 7, np.int32))
    batch = make_batch(4, slot=[C, 2, C, 3], target=[0, -1, 5, 6], use_counts=1)
    logits = random_logits(4)
    output, after = draw(logits, batch, before)
    expected_tokens = np.full(C, 99)
    expected_tokens[2] = logits[1].argmax()
    expected_counts = np.full((C, V), 7)
    expected_counts[2, output.tokens[1]] += 1
    assert np.array_equal(after.last_tokens, expected_tokens)
    assert np.array_equal(after.counts, expected_counts)


def test_counts_follow_only_the_slots_that_keep_them(make_batch):
    _, after = draw(random_logits(2), make_batch(2, slot=[1, 4], use_counts=[0, 1]))
    assert np.asarray(after.counts).sum(1).tolist() == [0, 0, 0, 0, 1, 0, 0, 0]


def hf_repetition(logits, seen, penalty):
    """transformers' RepetitionPenaltyLogitsProcessor: negative scores are multiplied, others divided."""
    out = logits.copy()
    for token in seen:
        out[token] = out[token] * penalty if out[token] < 0 else out[token] / penalty
    return out


def test_penalties_equal_the_reference_formulas(make_batch):
    """Greedy draws under OpenAI's frequency and presence and HF's repetition penalty, over prompt and drawn ids."""
    prompt, drawn = [3, 9, 9, 20], [3, 5, 5, 5, 30]
    counts = np.zeros((C, V), np.int32)
    for token in drawn:
        counts[0, token] += 1
    counts[0, list(set(prompt))] += IN_PROMPT
    captured = []

    def capture(logits, context):
        captured.append(logits)
        return logits

    logits = random_logits(2)
    batch = make_batch(2, repetition_penalty=1.8, frequency_penalty=0.3, presence_penalty=-0.7, use_counts=[1, 0])
    sample(jnp.asarray(logits), batch, state_of(counts=counts), processors=(capture,))
    expected = hf_repetition(logits[0], set(prompt) | set(drawn), 1.8)
    for token in set(drawn):
        expected[token] -= 0.3 * drawn.count(token) - 0.7
    np.testing.assert_allclose(captured[0][0], expected, rtol=1e-6, atol=1e-6)
    assert np.array_equal(captured[0][1], logits[1])


def test_bias_comes_before_penalties(make_batch):
    """As in vLLM: a bias that turns a logit negative makes the repetition penalty multiply it."""
    logits = np.asarray([[1.0, -4.0, -5.5, -9.0]])
    bias = np.zeros((1, 4), np.float32)
    bias[0, 0] = -3.0  # -2, times 2.5 = -5; the other order gives 0.4 - 3 = -2.6, which would win
    counts = np.zeros((1, 4), np.int32)
    counts[0, 0] = 1
    batch = make_batch(1, use_bias=1, use_counts=1, repetition_penalty=2.5)
    output, _ = draw(logits, batch, state_of(1, 4, bias=bias, counts=counts))
    assert output.tokens.tolist() == [1]


def test_custom_processors_see_context_and_come_before_temperature(make_batch):
    counts = np.zeros((C, V), np.int32)
    counts[2, 6] = 3 + IN_PROMPT
    counts[2, 8] = IN_PROMPT

    def ban_drawn(logits, context):
        return jnp.where(context.output_counts() > 0, -jnp.inf, logits)

    def prefer_prompt(logits, context):
        return logits + 1000.0 * context.in_prompt() + 0.0 * context.position[:, None]

    batch = make_batch(1, slot=2, use_counts=1, temperature=0.5, top_k=1)
    output, _ = draw(random_logits(1), batch, state_of(counts=counts), processors=(prefer_prompt, ban_drawn))
    assert output.tokens.tolist() == [8]
    poisoned, _ = draw(random_logits(1), batch, processors=(lambda logits, context: logits * jnp.nan,))
    assert poisoned.finite.tolist() == [False]


def test_logprobs_are_of_the_raw_logits(make_batch):
    """Field case 12: log-softmax in float64, whatever sampling does to the row."""
    logits = random_logits(5, scale=4)
    bias = np.zeros((C, V), np.float32)
    bias[0, 3] = 50
    targets = [-1, -1, -1, 17, 0]
    batch = make_batch(
        5, target=targets, slot=[0, 1, 2, C, C], temperature=[0, 2, 0.5, 0, 0], top_k=3, use_bias=[1, 0, 0, 0, 0],
        want_logprobs=1, seed_lo=4,
    )  # fmt: skip
    output, _ = draw(logits, batch, state_of(bias=bias))
    exact = logits.astype(np.float64)
    exact = exact - exact.max(1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    chosen = np.where(np.asarray(targets) < 0, output.tokens, targets)
    rows = np.arange(5)
    found = output.logprobs
    assert output.tokens[0] == 3
    np.testing.assert_allclose(found.target_logprobs, exact[rows, chosen], atol=1e-5)
    assert found.target_ranks.tolist() == [1 + int((row > row[c]).sum()) for row, c in zip(logits, chosen, strict=True)]
    order = np.argsort(-logits, axis=1, kind="stable")[:, :4]
    assert np.array_equal(found.top_ids, order)
    np.testing.assert_allclose(found.top_logprobs, np.take_along_axis(exact, order, 1), atol=1e-5)
    whole = logits - np.asarray(found.log_normalizers)[:, None]
    assert (whole <= 0).all()
    np.testing.assert_allclose(np.exp(whole.astype(np.float64)).sum(1), 1, atol=1e-5)


def test_a_certain_token_has_logprob_zero_not_above():
    logits = np.zeros((1, V), np.float32)
    logits[0, 5] = 200.0
    found = compute_logprobs(jnp.asarray(logits), jnp.asarray([5]), 2)
    assert float(found.target_logprobs[0]) == 0.0
    assert found.top_ids.tolist() == [[5, 0]]


def test_equal_logits_share_a_rank():
    found = compute_logprobs(jnp.asarray([[1.0, 3.0, 1.0, 2.0]]), jnp.asarray([2]), 4)
    assert found.target_ranks.tolist() == [3]
    assert found.top_ids.tolist() == [[1, 3, 0, 2]]


def test_one_program_serves_every_mix(make_batch):
    step = jax.jit(partial(sample, num_logprobs=2))
    for values in (
        {},
        {"temperature": 1.0},
        {"temperature": [0, 1.3], "top_k": 5, "top_p": 0.3, "min_p": 0.1},
        {"use_bias": 1, "use_counts": [0, 1], "repetition_penalty": 2.0},
        {"want_logprobs": 1, "target": [-1, 3]},
    ):
        step(random_logits(2), make_batch(2, **values), state_of())
    assert step._cache_size() == 1


SPECIAL = st.sampled_from([0.0, -0.0, 1.0, 1.0, -7.5, 88.0, -1e30, 1e30, np.nan, np.inf, -np.inf])


@settings(max_examples=80, deadline=None)
@given(
    hnp.arrays(np.float32, st.sampled_from([(1, 1), (2, 9), (3, 4)]), elements=SPECIAL | st.integers(-3, 3)),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 4),
    st.sampled_from([1.0, 0.7, 0.2]),
)
def test_any_row_is_either_flagged_or_drawn_from_its_candidates(make_batch, logits, temperature, top_k, top_p):
    rows, vocab_size = logits.shape
    batch = make_batch(rows, temperature=temperature, top_k=top_k, top_p=top_p, seed_lo=np.arange(rows))
    output, _ = plain_jitted(logits, batch, state_of(vocab_size=vocab_size))
    assert output.finite.tolist() == np.isfinite(logits).all(1).tolist()
    assert ((np.asarray(output.tokens) >= 0) & (np.asarray(output.tokens) < vocab_size)).all()
    for row, token, fine in zip(logits, output.tokens.tolist(), output.finite.tolist(), strict=True):
        if fine and (temperature == 0 or top_k == 1):
            assert row[token] == row.max()
        elif fine and top_k:
            assert row[token] >= np.sort(row)[::-1][min(top_k, vocab_size) - 1]


def test_a_processor_that_changes_the_shape_is_refused_by_name(make_batch):
    def first_three(logits, context):
        return logits[:, :3]

    with pytest.raises(ValueError, match=r"first_three returned shape \(2, 3\)"):
        draw(random_logits(2), make_batch(2), processors=[first_three])


def test_a_processor_may_compute_in_another_dtype(make_batch):
    def halve(logits, context):
        return (logits / 2).astype(jnp.float16)

    logits = random_logits(2)
    output, _ = draw(logits, make_batch(2), processors=[halve])
    assert output.tokens.tolist() == logits.argmax(1).tolist()
