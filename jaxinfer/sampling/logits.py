"""Pure transforms of logits rows, in the order in which the sampler applies them (vLLM's order).

bias and bans -> repetition, frequency, presence penalty -> custom processors -> temperature -> min-p -> top-k -> top-p.

min-p, top-k and top-p each keep an upper set of the row, so together they are one threshold. It is found exactly and
without sorting: floats are mapped to unsigned ints of the same order and the threshold is built bit by bit from the
top, 32 passes over the row. Values equal to the threshold are all kept.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.sampling.batch import SamplingBatch
from jaxinfer.sampling.draft_rows import DraftRows
from jaxinfer.sampling.state import IN_PROMPT


class LogitsContext(NamedTuple):
    """What a custom logits processor may look at besides the logits[R, V].

    A processor is a pure JAX function `(logits, context) -> logits`, traced into the step, applied to every row after
    bias and penalties and before temperature. It must treat each row by itself.

    Attributes:
        slot: int32[R], which running request the row belongs to; C for rows that do not draw.
        position: int32[R], position of the token to be drawn.
        slot_counts: int32[C, V], as in SamplingState, without the tokens of drafts, which `output_counts` has.
        drafts: the tokens of drafts that the rows are behind of, None where there are no drafts.
    """

    slot: jax.Array
    position: jax.Array
    slot_counts: jax.Array
    drafts: DraftRows | None = None

    def output_counts(self) -> jax.Array:
        """int32[R, V], how often each id was drawn before the row's position."""
        return self._counts() & (IN_PROMPT - 1)

    def in_prompt(self) -> jax.Array:
        """bool[R, V], which ids the prompt has."""
        return self._counts() >= IN_PROMPT

    def _counts(self) -> jax.Array:
        counts = self.slot_counts.at[self.slot].get(mode="clip")
        return counts if self.drafts is None else self.drafts.add_counts(counts)


LogitsProcessor = Callable[[jax.Array, LogitsContext], jax.Array]


def scaled_rows(logits: jax.Array, factor: jax.Array) -> jax.Array:
    """``logits[R, V] * factor[R]``. A branch of its own, so that the products are rounded: XLA would fuse them with a
    difference that follows, and LLVM make one operation of the two."""
    return lax.cond(jnp.any(factor != 1.0), lambda: logits * factor[:, None], lambda: logits)


def apply_bias(logits: jax.Array, bias: jax.Array, use_bias: jax.Array) -> jax.Array:
    """Adds bias[R, V] (-inf bans) to the rows of logits[R, V] whose use_bias[R] is set."""
    return jnp.where(use_bias[:, None] > 0, logits + bias, logits)


def apply_penalties(logits: jax.Array, counts: jax.Array, batch: SamplingBatch) -> jax.Array:
    """Repetition penalty over prompt and output (CTRL, arXiv:1909.05858), then frequency and presence over the output.

    Args:
        logits: float32[R, V].
        counts: int32[R, V], as in SamplingState.
        batch: rows with `use_counts` 0 are left alone.
    """
    drawn = (counts & (IN_PROMPT - 1)).astype(logits.dtype)
    repetition = batch.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    penalised = jnp.where(counts > 0, repeated, logits)
    penalised = penalised - batch.frequency_penalty[:, None] * drawn
    penalised = penalised - jnp.where(drawn > 0, batch.presence_penalty[:, None], 0.0)
    return jnp.where(batch.use_counts[:, None] > 0, penalised, logits)


def keep_candidates(
    logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array, active: jax.Array
) -> jax.Array:
    """Sets to -inf what min-p, then top-k of the rest, then top-p of the rest leave out.

    Args:
        logits: float32[R, V], after temperature.
        top_k: int32[R], the k largest and all that equal the k-th; 0 or at least V keeps all.
        top_p: float32[R], the smallest set of largest tokens whose share of the mass is at least top_p, with all that
            equal the smallest one; 1 keeps all.
        min_p: float32[R], tokens at least min_p times as likely as the best; 0 keeps all.
        active: bool[R], rows that matter; when none asks for a filter its passes are skipped.
    """
    ordered = order_bits(logits)
    best = jnp.max(logits, axis=1)
    threshold = order_bits(best + jnp.log(min_p))
    limits_k = active & (top_k > 0) & (top_k < logits.shape[1])
    threshold = lax.cond(
        jnp.any(limits_k),
        lambda: jnp.where(limits_k, jnp.maximum(threshold, top_k_threshold(ordered, top_k)), threshold),
        lambda: threshold,
    )
    limits_p = active & (top_p < 1.0)
    threshold = lax.cond(
        jnp.any(limits_p),
        lambda: jnp.where(limits_p, top_p_threshold(logits, ordered, best, threshold, top_p), threshold),
        lambda: threshold,
    )
    return jnp.where(ordered >= threshold[:, None], logits, -jnp.inf)


def order_bits(values: jax.Array) -> jax.Array:
    """float32 -> uint32 of the same order; -0 equals 0."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0.0, 0.0, values), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def top_k_threshold(ordered: jax.Array, top_k: jax.Array) -> jax.Array:
    """uint32[R], the top_k[R]-th largest of each row of ordered[R, V]."""
    return _largest_threshold(lambda candidate: jnp.sum(ordered >= candidate[:, None], axis=1) >= top_k, top_k.shape)


def top_p_threshold(
    logits: jax.Array, ordered: jax.Array, best: jax.Array, floor: jax.Array, top_p: jax.Array
) -> jax.Array:
    """uint32[R], the largest threshold above which the share of the mass at or above `floor` is at least top_p.

    Args:
        logits: float32[R, V].
        ordered: uint32[R, V], `order_bits(logits)`.
        best: float32[R], largest logit of each row.
        floor: uint32[R], what lies below does not count.
        top_p: float32[R].
    """
    mass = jnp.where(ordered >= floor[:, None], jnp.exp(logits - best[:, None]), 0.0)
    needed = top_p * jnp.sum(mass, axis=1)

    def reaches(candidate: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(ordered >= candidate[:, None], mass, 0.0), axis=1) >= needed

    return jnp.maximum(_largest_threshold(reaches, top_p.shape), floor)


def _largest_threshold(holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """uint32[shape], the largest for which `holds` is true, given that it is true up to some value and not above."""

    def try_bit(step: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(1 << 31) >> step.astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, threshold)

    return lax.fori_loop(0, 32, try_bit, jnp.zeros(shape, jnp.uint32))
