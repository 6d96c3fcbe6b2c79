"""GPTQ against the paper's own formula: one weight after the other, with the inverse of the remaining Hessian."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.quant.gptq import SHARES, gptq, inverse_factor, narrowed_grid, strongest_first
from jaxinfer.quant.grid import Grid, output_error, restored, rounded

DAMPING = 0.01


def naive_grid(weights: np.ndarray, bits: int, symmetric: bool, share: float = 1.0) -> tuple[float, float]:
    low, high = min(weights.min() * share, 0.0), max(weights.max() * share, 0.0)
    largest = 2**bits - 1
    if symmetric:
        high = max(-low, high)
        low = -high
    scale = float(np.float16(max((high - low) / largest, 2.0**-14)))
    return scale, (largest + 1) / 2 if symmetric else float(np.clip(np.rint(-low / scale), 0, largest))


def naive_gptq(
    weights: np.ndarray,
    hessian: np.ndarray,
    order: np.ndarray,
    bits: int,
    group: int,
    symmetric: bool,
    static_groups: bool,
) -> np.ndarray:
    """float64 values, row by row (the paper's equation 2): the rest moves by ``-e / [H_F^-1]_qq * (H_F^-1)_:,q``."""
    hessian = hessian.astype(np.float64)
    dead = np.diag(hessian) == 0
    damped = hessian + DAMPING * np.diag(hessian)[~dead].mean() * np.eye(len(hessian))
    damped[dead, dead] += 1
    out = np.zeros(weights.shape)
    for n, row in enumerate(weights.astype(np.float64)):
        row = np.where(dead, 0, row)
        start = row.copy()
        inverse = np.linalg.inv(damped)
        for place, column in enumerate(order):
            if static_groups:
                first = column // group * group
                grid = naive_grid(start[first : first + group], bits, symmetric)
            elif place % group == 0:
                grid = naive_grid(row[order[place : place + group]], bits, symmetric)
            scale, zero = grid
            code = np.clip(np.rint(row[column] / scale) + zero, 0, 2**bits - 1)
            out[n, column] = (code - zero) * scale
            error = (row[column] - out[n, column]) / inverse[column, column]
            left = order[place + 1 :]
            row[left] -= error * inverse[left, column]
            inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return out


def problem(rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Weights, and the Hessian of inputs that go together, one of which is always 0."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((600, columns)) @ rng.standard_normal((columns, columns)) / columns**0.5
    x = (mixed * rng.lognormal(0, 0.7, columns)).astype(np.float32)
    x[:, 5] = 0
    return rng.standard_normal((rows, columns)).astype(np.float32), x.T @ x


def values_of(codes: np.ndarray, grid: Grid, order: np.ndarray | None) -> np.ndarray:
    values = np.asarray(restored(codes, grid))
    return values if order is None else values[:, np.argsort(order)]


@pytest.mark.parametrize(
    ("columns", "bits", "group", "symmetric", "act_order", "static_groups"),
    [
        (96, 4, 32, True, False, False),  # several groups in a block
        (96, 4, 96, False, False, False),  # one group
        (320, 4, 160, False, True, False),  # groups of several blocks, which are of 80
        (96, 8, 32, False, True, False),
        (96, 4, 32, True, True, True),
    ],
)
def test_equals_the_paper_s_formula(
    columns: int, bits: int, group: int, symmetric: bool, act_order: bool, static_groups: bool
) -> None:
    """A code may be the next one where float32 and float64 round a tie differently."""
    weights, hessian = problem(6, columns)
    order = strongest_first(jnp.asarray(hessian)) if act_order else None
    codes, grid = gptq(
        weights,
        hessian,
        order,
        bits=bits,
        group=group,
        symmetric=symmetric,
        static_groups=static_groups,
        damping=DAMPING,
    )
    found = values_of(codes, grid, None if static_groups or order is None else np.asarray(order))
    inputs = np.arange(columns) if order is None else np.argsort(-np.diag(hessian), kind="stable")
    expected = naive_gptq(weights, hessian, inputs, bits, group, symmetric, static_groups)
    same = np.abs(found - expected) < 1e-4
    assert same.mean() > 0.98
    assert (np.asarray(codes).max(), np.asarray(codes).min()) == (2**bits - 1, 0)
    ours, theirs = (output_error(jnp.asarray(q, jnp.float32) - weights, hessian).sum() for q in (found, expected))
    assert float(ours) == pytest.approx(float(theirs), rel=0.02)
    assert (found[:, 5] == 0).all()


def naive_error(weights: np.ndarray, strengths: np.ndarray, grid: tuple[float, float]) -> float:
    scale, zero = grid
    code = np.clip(np.rint(weights / scale) + zero, 0, 15)
    return float((strengths * ((code - zero) * scale - weights) ** 2).sum())


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_narrowed_range_is_the_best_of_those_that_are_tried(symmetric: bool) -> None:
    rng = np.random.default_rng(3)
    weights = rng.standard_t(3, (32, 50)).astype(np.float32)
    strengths = rng.lognormal(0, 1, 32).astype(np.float32)
    scale, zero = (
        np.asarray(part) for part in narrowed_grid(jnp.asarray(weights), strengths, bits=4, symmetric=symmetric)
    )
    shares = []
    for n, column in enumerate(weights.T):
        tried = [naive_grid(column, 4, symmetric, share) for share in SHARES]
        errors = [naive_error(column, strengths, grid) for grid in tried]
        assert naive_error(column, strengths, (scale[n], zero[n])) == pytest.approx(min(errors), rel=1e-4)
        shares.append(SHARES[int(np.argmin(errors))])
    assert 0.5 < np.mean(np.array(shares) < 1) < 1


def test_beats_rounding_to_nearest() -> None:
    weights, hessian = problem(24, 128, seed=1)
    hessian = jnp.asarray(hessian)
    nearest = output_error(restored(*rounded(weights, bits=4, group=32, symmetric=True)) - weights, hessian).sum()
    plain = output_error(restored(*gptq(weights, hessian, bits=4, group=32)) - weights, hessian).sum()
    order = strongest_first(hessian)
    ordered = values_of(*gptq(weights, hessian, order, bits=4, group=32), np.asarray(order))
    static = restored(*gptq(weights, hessian, order, bits=4, group=32, static_groups=True, narrow=True))
    assert plain < 0.6 * nearest
    assert output_error(static - weights, hessian).sum() < plain
    assert output_error(ordered - weights, hessian).sum() < plain


def test_the_factor_is_that_of_the_inverse() -> None:
    _, hessian = problem(1, 40, seed=2)
    hessian = hessian.astype(np.float64) / np.diag(hessian).mean() + 0.1 * np.eye(40)
    factor = np.asarray(inverse_factor(jnp.asarray(hessian, jnp.float32)))
    np.testing.assert_allclose(factor.T @ factor, np.linalg.inv(hessian), rtol=0, atol=1e-4)
    assert (np.tril(factor, -1) == 0).all()


def test_inputs_that_are_always_zero_and_weights_that_are_tiny_give_no_nan() -> None:
    weights = np.concatenate([np.zeros((1, 32)), np.full((1, 32), 1e-9), np.full((1, 32), 1e4)]).astype(np.float32)
    codes, grid = gptq(weights, np.zeros((32, 32), np.float32), bits=4, group=16, symmetric=False)
    assert (np.asarray(restored(codes, grid)) == 0).all()
    codes, grid = gptq(weights, np.eye(32, dtype=np.float32), bits=4, group=16, symmetric=False)
    values = np.asarray(restored(codes, grid))
    assert (values[:2] == 0).all()
    np.testing.assert_allclose(values[2], 1e4, rtol=1e-3)
