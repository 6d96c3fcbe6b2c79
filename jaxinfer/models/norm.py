"""Normalisation layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (arXiv:1910.07467), computed in float32 whatever the dtype of ``x[T, D]``."""

    epsilon: float
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.param_dtype)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return wide.astype(x.dtype) * scale
