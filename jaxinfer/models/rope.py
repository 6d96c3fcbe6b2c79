"""Rotary position embedding (RoPE, arXiv:2104.09864), in the half-split layout of Hugging Face checkpoints."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import ModelConfig


class Rotation(NamedTuple):
    """Cosines and sines of the angles of each new token, float32 ``[T, R / 2]``: the first R channels turn."""

    cos: jax.Array
    sin: jax.Array


def inverse_frequencies(config: ModelConfig, *, local: bool = False) -> np.ndarray:
    """The R/2 angular frequencies in radians per position, float32, computed in float64.

    Args:
        config: the architecture.
        local: those of the windowed layers, where they have a base of their own.
    """
    exponents = np.arange(0, config.rotary_width, 2, dtype=np.float64) / config.rotary_width
    if local and config.local_rope_theta is not None:
        return (config.local_rope_theta**-exponents).astype(np.float32)
    if config.rope_scaling is None:
        frequencies = config.rope_theta**-exponents
    else:
        length = config.rope_length or config.max_position_embeddings
        frequencies = config.rope_scaling.frequencies(config.rope_theta, config.rotary_width, length)
    if config.rope_freq_factors is not None:
        frequencies = frequencies / np.asarray(config.rope_freq_factors, np.float64)
    return frequencies.astype(np.float32)


def rotation(config: ModelConfig, positions: jax.Array, rope: str = "global") -> Rotation:
    """Angles of ``positions[T]`` (int32, not negative), kept in float32 at every model dtype.

    Args:
        config: the architecture.
        positions: of the new tokens.
        rope: as in `LayerKind`; "none" leaves every channel as it is.
    """
    if rope == "none":
        ones = jnp.ones((positions.shape[0], 1), jnp.float32)
        return Rotation(ones, jnp.zeros_like(ones))
    frequencies = inverse_frequencies(config, local=rope == "local")
    magnitude = 1.0 if rope == "local" or config.rope_scaling is None else config.rope_scaling.magnitude()

    def compute() -> Rotation:
        angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return Rotation(cos, sin) if magnitude == 1 else Rotation(cos * magnitude, sin * magnitude)

    def compute_once() -> Rotation:
        # XLA's CPU backend would compute them anew in every layer and for every head: it fuses them into their users,
        # past a barrier too, but not out of a branch.
        zeros = jnp.zeros((positions.shape[0], frequencies.size), jnp.float32)
        return jax.lax.cond(positions[0] >= 0, compute, lambda: Rotation(zeros, zeros))

    rotation: Rotation = jax.lax.platform_dependent(cpu=compute_once, default=compute)
    return rotation


def rotate(x: jax.Array, angles: Rotation) -> jax.Array:
    """Rotates the first R channels of ``x[T, ..., H]`` by the angle of its token; channel i pairs with i + R/2."""
    half = angles.cos.shape[-1]
    broadcast = (x.shape[0],) + (1,) * (x.ndim - 2) + (half,)
    cos, sin = angles.cos.reshape(broadcast), angles.sin.reshape(broadcast)
    wide = x.astype(jnp.float32)
    first, second, rest = jnp.split(wide, [half, 2 * half], axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return rotated.astype(x.dtype)
