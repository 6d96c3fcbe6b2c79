"""The k largest of each row, without sorting a vocabulary."""

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 128
"""A row's values are looked at in groups of so many: the k largest are in the k groups with the largest maxima."""


def best_of_rows(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest values of each row, largest first, the first among equals, and their indices.

    XLA sorts whole rows for `lax.top_k` on a GPU, which takes many times as long as reading them and as much memory
    again as they do.

    Args:
        values: float32[R, V], not NaN.
        k: at most V.

    Returns:
        float32[R, k] and int32[R, k].
    """
    rows, width = values.shape
    count = -(-width // CHUNK)
    if count <= 2 * k:
        return lax.top_k(values, k)
    groups = jnp.pad(values, ((0, 0), (0, count * CHUNK - width)), constant_values=-jnp.inf).reshape(rows, count, CHUNK)
    _, chosen = lax.top_k(groups.max(axis=2), k)
    chosen = jnp.sort(chosen, axis=1)  # so that among equals the first index comes first
    taken = jnp.take_along_axis(groups, chosen[:, :, None], axis=1).reshape(rows, k * CHUNK)
    best, places = lax.top_k(taken, k)
    indices = jnp.take_along_axis(chosen, places // CHUNK, axis=1) * CHUNK + places % CHUNK
    return best, indices
