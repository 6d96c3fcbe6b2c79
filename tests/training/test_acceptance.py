"""Lengths of accepted drafts, worked out by hand."""

import jax.numpy as jnp
import numpy as np

from jaxinfer.training.acceptance import chain_length, following


def test_a_chain_ends_at_its_first_wrong_guess() -> None:
    hits = jnp.array([[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 0]])
    assert chain_length(hits).tolist() == [4.0, 2.0, 1.0, 3.0]


def test_guesses_that_follow_a_place() -> None:
    hits = jnp.array([[True, False, True, True]])
    expected = [[[1, 0, 1], [0, 1, 1], [1, 1, 0], [1, 0, 0]]]
    assert np.array_equal(following(hits, 3), expected)
