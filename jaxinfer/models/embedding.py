"""Token embedding, and its use as the output head when the weights are tied."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.linear import parameter, project
from jaxinfer.quant.array import QuantArray, take_rows


class Embedding(nn.Module):
    """A table ``embedding[V, D]``: ids in, rows out; `logits` is the tied head.

    `sum_over`: inside `jax.shard_map`, the mesh axis over which the rows are dealt out, V to each device; None for not.
    """

    vocab_size: int
    hidden_size: int
    param_dtype: jnp.dtype = jnp.float32
    sum_over: str | None = None

    def setup(self) -> None:
        shape = self.vocab_size, self.hidden_size
        self.embedding = parameter(self, "embedding", nn.initializers.normal(0.02), shape, self.param_dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Rows of the table for ``tokens`` (int32, any shape); ids must have been checked on the host."""
        if self.sum_over is None:
            return self._rows(tokens)
        own = tokens - jax.lax.axis_index(self.sum_over) * self.vocab_size
        is_here = (own >= 0) & (own < self.vocab_size)
        return jax.lax.psum(jnp.where(is_here[..., None], self._rows(own), 0), self.sum_over)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """``hidden[R, D] -> logits[R, V]`` in the dtype of the weights; of the rows that are here."""
        return project(hidden, self.embedding)

    def _rows(self, places: jax.Array) -> jax.Array:
        if isinstance(self.embedding, QuantArray):
            return take_rows(self.embedding, places)
        return jnp.take(self.embedding, places, axis=0, mode="clip")
