"""Normalisation layers."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.config import ModelConfig


class Norm(nn.Module):
    """Root-mean-square (arXiv:1910.07467) or layer normalisation (arXiv:1607.06450), in float32 whatever x's dtype.

    Normalises the last axes of ``x[T, ..., *shape]``, as many as `over` says.

    Attributes:
        config: says which norm.
        shape: of the weight.
        over: how many of the last axes are normalised together.
        use_bias: a layer norm adds a bias.
        param_dtype: dtype of freshly initialised parameters.
        sum_over: inside `jax.shard_map`, the mesh axis that the normalised axes are split over.
    """

    config: ModelConfig
    shape: Sequence[int]
    over: int = 1
    use_bias: bool = False
    param_dtype: jnp.dtype = jnp.float32
    sum_over: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        start = nn.initializers.zeros if c.norm_unit_offset else nn.initializers.ones
        scale = self.param("scale", start, tuple(self.shape), self.param_dtype)
        wide = x.astype(jnp.float32)
        if c.norm == "layer":
            wide = wide - self._mean(wide)
        wide = wide * jax.lax.rsqrt(self._mean(wide * wide) + c.rms_norm_eps)
        if c.norm == "rms" and not c.norm_unit_offset:
            return wide.astype(x.dtype) * scale
        # These families' references round once, at the end.
        wide = wide * (scale.astype(jnp.float32) + (1.0 if c.norm_unit_offset else 0.0))
        if self.use_bias:
            wide = wide + self.param("bias", nn.initializers.zeros, tuple(self.shape), self.param_dtype)
        return wide.astype(x.dtype)

    def _mean(self, x: jax.Array) -> jax.Array:
        mean = jnp.mean(x, axis=tuple(range(-self.over, 0)), keepdims=True)
        return mean if self.sum_over is None else jax.lax.pmean(mean, self.sum_over)
