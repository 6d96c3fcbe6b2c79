"""SamplingBatch: the sampler's per-row inputs, and the int32 matrix in which they travel to the device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class SamplingBatch(NamedTuple):
    """How each of the R logits rows of a step is treated; every leaf has shape [R].

    A row either draws the next token of a request or scores a prompt position. Padding rows have `slot` = C, a `target`
    and zeros, so that they neither draw nor write.

    Attributes:
        slot: int32, the row of SamplingState that a drawing row reads and writes; C for rows that write nothing.
        target: int32, the id whose log-probability is wanted when the row scores; -1 when it draws, -2 when it draws on
            condition that a draft is right, so that nothing is noted of it.
        position: int32, absolute position of the token to be drawn (the prompt's first token has position 0).
        temperature: float32, 0 takes the largest processed logit. Of a row that scores with a temperature, its
            inverse.
        top_k: int32, 0 keeps all.
        top_p: float32 in (0, 1], 1 keeps all.
        min_p: float32 in [0, 1], 0 keeps all.
        repetition_penalty: float32 above 0.
        presence_penalty: float32.
        frequency_penalty: float32.
        seed_lo, seed_hi: uint32, the halves of the request's 64-bit seed.
        child_index: int32, which of the n samples of a prompt this is.
        use_bias: int32, 1 when the slot's bias row applies.
        use_counts: int32, 1 when the slot's counts are kept (penalties, custom logits processors).
        want_logprobs: int32, 1 when log-probabilities of the row are wanted.
    """

    slot: jax.Array
    target: jax.Array
    position: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    seed_lo: jax.Array
    seed_hi: jax.Array
    child_index: jax.Array
    use_bias: jax.Array
    use_counts: jax.Array
    want_logprobs: jax.Array

    @classmethod
    def unpack(cls, packed: jax.Array) -> "SamplingBatch":
        """From int32[NUM_FIELDS, R], one matrix row a field in the order above, floats and seeds as their bits."""
        columns = []
        for name, column in zip(cls._fields, packed, strict=True):
            dtype = jnp.float32 if name in FLOAT_FIELDS else jnp.uint32 if name in SEED_FIELDS else jnp.int32
            columns.append(lax.bitcast_convert_type(column, dtype))
        return cls(*columns)

    @property
    def draws(self) -> jax.Array:
        """bool[R], the row draws a token."""
        return self.target < 0

    @property
    def records(self) -> jax.Array:
        """bool[R], the token is certain to be the request's next."""
        return self.target == DRAWS


DRAWS, VERIFIES = -1, -2
"""Values of `target`."""
NUM_FIELDS = len(SamplingBatch._fields)
FIELD = {name: index for index, name in enumerate(SamplingBatch._fields)}
"""Which row of the packed matrix a field is."""
FLOAT_FIELDS = frozenset(
    ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
)
SEED_FIELDS = frozenset(("seed_lo", "seed_hi"))
