"""Logits whose vocabulary is dealt out over the devices of a mesh axis, inside `jax.shard_map`."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.sampling.sampler import all_finite, first_largest


def sample_greedy_split(part: jax.Array, axis: str, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """`sample_greedy` of the whole rows: every device finds the best of its columns, and one all-reduce of three
    numbers a row and device says whose is the best of all.

    Args:
        part: float32[R, V'], this device's columns; those past the vocabulary's end are padding.
        axis: the mesh axis.
        vocab_size: V of the whole.

    Returns:
        (tokens int32[R], finite bool[R]), on every device the same.
    """
    device, devices = lax.axis_index(axis), lax.axis_size(axis)
    first = device * part.shape[1]
    is_token = first + lax.broadcasted_iota(jnp.int32, part.shape, 1) < vocab_size
    tokens, best = first_largest(jnp.where(is_token, part, -jnp.inf))
    own = jnp.stack([lax.bitcast_convert_type(best, jnp.int32), first + tokens, all_finite(part).astype(jnp.int32)])
    places = jnp.zeros((devices, *own.shape), jnp.int32).at[device].set(own)
    found = lax.psum(places, axis)
    values = lax.bitcast_convert_type(found[:, 0], jnp.float32)
    is_best = values == jnp.max(values, axis=0)
    return jnp.min(jnp.where(is_best, found[:, 1], vocab_size - 1), axis=0), jnp.min(found[:, 2], axis=0) > 0


def gather_logits(part: jax.Array, axis: str, vocab_size: int) -> jax.Array:
    """float32[R, V], the whole rows on every device, without the padding at the end.

    Args:
        part, axis, vocab_size: as for `sample_greedy_split`.
    """
    return lax.all_gather(part, axis, axis=1, tiled=True)[:, :vocab_size]
