"""Rotating inputs before they are rounded (QuaRot's idea, arXiv:2404.00456).

Where a row has a few values far larger than the others, its one scale leaves little for the others. An orthonormal
matrix on weights and activations alike changes no product and spreads such a value over its block. Hadamard's is its
own inverse.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np


def rotated(rows: np.ndarray, block: int) -> np.ndarray:
    """float32 rows ``[..., K]`` with each block of `block` neighbours, a power of two, multiplied by `hadamard`."""
    turned: np.ndarray = rows.astype(np.float32, copy=False).reshape(-1, block) @ hadamard(block)
    return turned.reshape(rows.shape)


def rotate(x: jax.Array, block: int) -> jax.Array:
    """As `rotated`, of ``[T, K]`` on the device; computed in float32, and of x's dtype."""
    blocks = x.astype(jnp.float32).reshape(-1, block)
    turned = jnp.matmul(blocks, jnp.asarray(hadamard(block)), precision=jax.lax.Precision.HIGHEST)
    return turned.reshape(x.shape).astype(x.dtype)


def hadamard(size: int) -> np.ndarray:
    """Sylvester's matrix of this power of two over the root of its size: symmetric, orthonormal, float32."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(math.sqrt(size))
