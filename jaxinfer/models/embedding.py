"""Token embedding, and its use as the output head when the weights are tied."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.linear import parameter, project
from jaxinfer.quant.array import QuantArray, take_rows


class Embedding(nn.Module):
    """A table ``embedding[V, D]``: ids in, rows out; `logits` is the tied head."""

    vocab_size: int
    hidden_size: int
    param_dtype: jnp.dtype = jnp.float32

    def setup(self) -> None:
        shape = self.vocab_size, self.hidden_size
        self.embedding = parameter(self, "embedding", nn.initializers.normal(0.02), shape, self.param_dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Rows of the table for ``tokens`` (int32, any shape); ids must have been checked on the host."""
        if isinstance(self.embedding, QuantArray):
            return take_rows(self.embedding, tokens)
        return jnp.take(self.embedding, tokens, axis=0, mode="clip")

    def logits(self, hidden: jax.Array) -> jax.Array:
        """``hidden[R, D] -> logits[R, V]`` in the dtype of the weights."""
        return project(hidden, self.embedding)
