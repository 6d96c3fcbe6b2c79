"""The operation in plain jax.numpy: the specification, and what runs where there is no kernel."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import lax

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {
        "silu": jax.nn.silu,
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_tanh": partial(jax.nn.gelu, approximate=True),
        "relu": jax.nn.relu,
    }
)
"""What the gate can go through, by name."""


def norm_gated_matmul_reference(
    x: jax.Array, scale: jax.Array, weights: jax.Array, *, epsilon: float, activation: str
) -> jax.Array:
    """Same contract as `norm_gated_matmul`."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    normed = wide.astype(x.dtype) * scale
    gate, up = (lax.dot_general(normed, part, (((1,), (1,)), ((), ()))) for part in weights)
    return ACTIVATIONS[activation](gate) * up
