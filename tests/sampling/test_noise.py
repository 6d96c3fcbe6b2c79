"""Noise: the generator's published test vectors, the distribution, and independence of everything but the key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling.noise import _gumbel, gumbel_noise, threefry_2x32

jitted = jax.jit(gumbel_noise, static_argnums=4)


def u32(values):
    return jnp.asarray(values, jnp.uint32)


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_known_answers(key, counter, expected):
    """The known-answer vectors of Random123 (threefry2x32, 20 rounds)."""
    words = threefry_2x32(tuple(map(u32, key)), tuple(map(u32, counter)))
    assert tuple(int(word) for word in words) == expected


def noise(seed=(1, 2), child=0, position=0, vocab_size=50):
    row = [np.atleast_1d(np.asarray(x)) for x in (*seed, child, position)]
    row = np.broadcast_arrays(*row)
    return np.asarray(jitted(u32(row[0]), u32(row[1]), jnp.asarray(row[2]), jnp.asarray(row[3]), vocab_size))


def test_distribution_is_gumbel():
    values = noise(position=np.arange(500), vocab_size=401).ravel()
    assert abs(values.mean() - 0.57722) < 0.01
    assert abs(values.var() - np.pi**2 / 6) < 0.02
    for quantile in (0.01, 0.25, 0.5, 0.9, 0.999):
        assert abs(np.mean(values < -np.log(-np.log(quantile))) - quantile) < 0.003


def test_rows_and_tokens_are_uncorrelated():
    values = noise(position=np.arange(200), vocab_size=200)
    for axis_view in (values, values.T):
        correlation = np.corrcoef(axis_view) - np.eye(200)
        assert np.abs(correlation).max() < 0.4
    halves = np.corrcoef(values[:, :100].ravel(), values[:, 100:].ravel())[0, 1]
    assert abs(halves) < 0.03


@pytest.mark.parametrize("change", [{"seed": (2, 2)}, {"seed": (1, 3)}, {"child": 1}, {"position": 1}])
def test_every_part_of_the_key_counts(change):
    assert np.mean(noise(vocab_size=200) == noise(vocab_size=200, **change)) < 0.02


def test_finite_for_every_bit_pattern_edge():
    edges = u32([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFF00, 0xFFFFFFFF])
    values = np.asarray(jax.jit(_gumbel)(edges))
    assert np.isfinite(values).all()
    assert (np.diff(values) <= 0).all()
    assert values[0] == pytest.approx(33 * np.log(2), rel=1e-4)


def test_odd_and_tiny_vocabularies():
    assert noise(vocab_size=1).shape == (1, 1)
    assert np.array_equal(noise(vocab_size=7), noise(vocab_size=8)[:, :7])
