"""Rotary position embedding (RoPE, arXiv:2104.09864), in the half-split layout of Hugging Face checkpoints."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import ModelConfig


class Rotation(NamedTuple):
    """Cosines and sines of the angles of each new token, float32 ``[T, H / 2]``."""

    cos: jax.Array
    sin: jax.Array


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """The H/2 angular frequencies in radians per position, float32, computed in float64."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_freq_factors is not None:
        frequencies = frequencies / np.asarray(config.rope_freq_factors, np.float64)
    return frequencies.astype(np.float32)


def rotation(config: ModelConfig, positions: jax.Array) -> Rotation:
    """Angles of ``positions[T]`` (int32, not negative), kept in float32 at every model dtype."""

    def compute() -> Rotation:
        angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies(config)[None, :]
        return Rotation(jnp.cos(angles), jnp.sin(angles))

    def compute_once() -> Rotation:
        # XLA's CPU backend would compute them anew in every layer and for every head: it fuses them into their users,
        # past a barrier too, but not out of a branch.
        zeros = jnp.zeros((positions.shape[0], config.head_dim // 2), jnp.float32)
        return jax.lax.cond(positions[0] >= 0, compute, lambda: Rotation(zeros, zeros))

    rotation: Rotation = jax.lax.platform_dependent(cpu=compute_once, default=compute)
    return rotation


def rotate(x: jax.Array, angles: Rotation) -> jax.Array:
    """Rotates ``x[T, ..., H]`` by the angle of its token; channel i pairs with channel i + H/2."""
    broadcast = (x.shape[0],) + (1,) * (x.ndim - 2) + (x.shape[-1] // 2,)
    cos, sin = angles.cos.reshape(broadcast), angles.sin.reshape(broadcast)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
