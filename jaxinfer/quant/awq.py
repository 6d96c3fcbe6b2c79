"""AWQ (arXiv:2306.00978): inputs with large activations are scaled up before rounding, and weights are clipped. JAX.

A matrix is seen as ``[E, N, K]``, an entry for each expert, one where there are none. Scaling multiplies the weights of
input k by ``s[k]``, and what makes the input is divided by it.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.quant.grid import output_error, restored, rounded

RATIOS = 20
"""Powers of the mean activations that are tried: 0, 1/20, ... 19/20."""
CLIPS = 10
"""Limits of a group's weights that are tried: 1, 19/20, ... 11/20 of their largest magnitude."""
_FAINTEST = 1e-4  # activation against the loudest at which its scale stops falling


class ScaleSearch(NamedTuple):
    """What `search_scales` found.

    Attributes:
        scale: float32, shape of the magnitudes.
        ratio: float32[], the power that it is.
        unscaled: float32, of each matrix: its outputs' error without scales.
    """

    scale: jax.Array
    ratio: jax.Array
    unscaled: jax.Array


@partial(jax.jit, static_argnames=("group",))
def search_scales(
    weights: tuple[jax.Array, ...], grams: tuple[jax.Array, ...], magnitude: jax.Array, *, group: tuple[int, ...]
) -> ScaleSearch:
    """The scales of inputs that several matrices share, of those tried: the least sum of their output errors, each
    against its error without scales, under which no matrix is worse off than without.

    Args:
        weights: float32[E, N, K] each.
        grams: float32[E, K, K] of each, see `output_error`.
        magnitude: float32[..., K], mean activations, of all experts or of each; broadcasts to ``[E, K]``.
        group: of each matrix: inputs that share a scale, asymmetric 4 bits.
    """

    def errors(ratio: jax.Array) -> jax.Array:
        scale = scales_at(ratio, magnitude)
        found = [
            scaled_error(matrix, gram, scale, group=size)
            for matrix, gram, size in zip(weights, grams, group, strict=True)
        ]
        return jnp.stack(found)

    ratios = jnp.arange(RATIOS) / RATIOS
    found = jax.lax.map(errors, ratios)
    against = found / jnp.where(found[0] > 0, found[0], 1.0)
    cost = jnp.where((found <= found[0]).all(1), against.sum(1), jnp.inf)
    ratio = ratios[jnp.argmin(cost)]
    return ScaleSearch(scales_at(ratio, magnitude), ratio, found[0])


def scales_at(ratio: jax.Array, magnitude: jax.Array) -> jax.Array:
    """Scales of one power: ``magnitude ** ratio``, with the geometric mean of the extremes divided out; 1 for inputs
    that are always 0."""
    seen = magnitude > 0
    kept = jnp.maximum(magnitude, _FAINTEST * magnitude.max(-1, keepdims=True))
    scale = jnp.where(seen, jnp.where(seen, kept, 1.0) ** ratio, 1.0)
    low = jnp.where(seen, scale, jnp.inf).min(-1, keepdims=True)
    high = jnp.where(seen, scale, 0.0).max(-1, keepdims=True)
    middle = jnp.where(high > 0, jnp.sqrt(low) * jnp.sqrt(high), 1.0)
    return jnp.where(seen, scale / middle, 1.0)


@partial(jax.jit, static_argnames=("group",))
def scaled_error(weights: jax.Array, gram: jax.Array, scale: jax.Array, *, group: int) -> jax.Array:
    """float32[]: what rounding ``weights[E, N, K] * scale`` changes in the outputs, with ``scale`` like ``[E, K]``."""
    scale = jnp.broadcast_to(scale, (len(weights), weights.shape[-1]))

    def of_expert(triple: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        matrix, gram, scale = triple
        stored = restored(*rounded(matrix * scale, bits=4, group=group, symmetric=False))
        return output_error(stored / scale - matrix, gram).sum()

    return jax.lax.map(of_expert, (weights, gram, scale)).sum()


@partial(jax.jit, static_argnames=("group",))
def clipped(weights: jax.Array, gram: jax.Array, *, group: int) -> jax.Array:
    """Weights whose groups are cut off where that makes the outputs' error least.

    The limit of each group of each channel is chosen by the error of the group's own part of the output. A channel
    whose limits together make its output worse stays as it is.

    Args:
        weights: float32[E, N, K], scaled.
        gram: float32[E, K, K] of inputs divided by the scales.
        group: inputs that share a scale, asymmetric 4 bits.
    """
    result: jax.Array = jax.lax.map(lambda pair: _clipped(pair[0], pair[1], group), (weights, gram))
    return result


def _clipped(weights: jax.Array, gram: jax.Array, group: int) -> jax.Array:
    rows, columns = weights.shape
    groups = columns // group
    parts = weights.reshape(rows, groups, group)
    blocks = gram.reshape(groups, group, groups, group)[jnp.arange(groups), :, jnp.arange(groups)]
    largest = jnp.abs(parts).max(-1, keepdims=True)

    def at(share: jax.Array) -> jax.Array:
        return jnp.clip(parts, -share * largest, share * largest)

    def errors(share: jax.Array) -> jax.Array:
        difference = _stored(at(share).reshape(rows, columns), group).reshape(parts.shape) - parts
        product = jnp.einsum("ngi,gij->ngj", difference, blocks, precision="highest")
        return (product * difference).sum(-1)

    shares = 1 - jnp.arange(CLIPS) / (2 * CLIPS)
    best = jnp.argmin(jax.lax.map(errors, shares), axis=0)
    cut = at(shares[best][..., None]).reshape(rows, columns)
    before, after = (output_error(_stored(matrix, group) - weights, gram) for matrix in (weights, cut))
    return jnp.where((after < before)[:, None], cut, weights)


def _stored(weights: jax.Array, group: int) -> jax.Array:
    return restored(*rounded(weights, bits=4, group=group, symmetric=False))
