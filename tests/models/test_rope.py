"""The angles of a step are computed once, whatever its number of layers."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.rope import inverse_frequencies, rotate, rotation

CONFIG = ModelConfig(40, 24, 20, 2, 6, 2, head_dim=8)


def test_cosines_are_not_computed_again_by_their_users_on_the_cpu() -> None:
    def layers(x: jax.Array, positions: jax.Array) -> list[jax.Array]:
        angles = rotation(CONFIG, positions)
        return [rotate(jax.lax.cumsum(x * layer), angles) for layer in range(3)]

    program = jax.jit(layers).lower(jnp.zeros((5, 6, 8)), jnp.arange(5)).compile().as_text()
    assert program.count(" cosine(") == program.count(" sine(") == 1


def test_angles_equal_numpy() -> None:
    positions = np.array([0, 3, 8191])
    angles = jax.jit(rotation, static_argnums=0)(CONFIG, jnp.asarray(positions))
    expected = positions[:, None].astype(np.float32) * inverse_frequencies(CONFIG)
    np.testing.assert_allclose(angles.cos, np.cos(expected.astype(np.float64)), atol=1e-6)
    np.testing.assert_allclose(angles.sin, np.sin(expected.astype(np.float64)), atol=1e-6)
