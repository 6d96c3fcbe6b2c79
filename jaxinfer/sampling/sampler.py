"""The sampler: logits rows -> drawn tokens and log-probabilities, on the device, one program for every mix of rows."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.config import TypicalAcceptance
from jaxinfer.sampling.batch import SamplingBatch
from jaxinfer.sampling.draft_rows import DraftRows, DrawnDrafts
from jaxinfer.sampling.logits import (
    LogitsContext,
    LogitsProcessor,
    apply_bias,
    apply_penalties,
    keep_candidates,
    scaled_rows,
)
from jaxinfer.sampling.noise import gumbel_noise
from jaxinfer.sampling.rejection import rejection_scores
from jaxinfer.sampling.state import SamplingState, record_tokens
from jaxinfer.sampling.typical import typical_tokens

Normalize = Callable[[jax.Array], jax.Array]

CPU_BLOCK = 8
"""Rows perturbed together on the CPU, at most: some arrays of 8 rows of a vocabulary fit its cache."""


class Logprobs(NamedTuple):
    """log_softmax of the raw model logits: no bias, penalty, processor, temperature or filter changes it; of rows that
    score with a temperature, of the logits over that.

    All zero when no row of the step has `want_logprobs`.

    Attributes:
        target_logprobs: float32[R], of the row's target, or of the token it drew.
        target_ranks: int32[R], 1 + the number of ids with a larger logit.
        top_ids: int32[R, k], the k largest, best first, the lower id first among equals.
        top_logprobs: float32[R, k].
        log_normalizers: float32[R], log of the sum of the exponentials: `logits - log_normalizers[:, None]` are the
            log-probabilities of the whole vocabulary.
    """

    target_logprobs: jax.Array
    target_ranks: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    log_normalizers: jax.Array


class SamplerOutput(NamedTuple):
    """What the sampler found out about each row.

    Attributes:
        tokens: int32[R], in 0 .. V - 1; means nothing in rows that do not draw or that a flag marks.
        finite: bool[R], False when the row's logits hold NaN or infinity, or a processor made such.
        allowed: bool[R], False when bans left no token to draw.
        logprobs: see Logprobs.
    """

    tokens: jax.Array
    finite: jax.Array
    allowed: jax.Array
    logprobs: Logprobs


def sample_greedy(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(tokens int32[R], finite bool[R]): the largest of each row of logits[R, V], the first among equals."""
    tokens, _ = first_largest(logits)
    return tokens, all_finite(logits)


def sample(
    logits: jax.Array,
    batch: SamplingBatch,
    state: SamplingState,
    *,
    processors: Sequence[LogitsProcessor] = (),
    num_logprobs: int = 0,
    drafts: DraftRows | None = None,
    typical: TypicalAcceptance | None = None,
    normalize: Normalize | None = None,
) -> tuple[SamplerOutput, SamplingState]:
    """Draws a token in every row that draws, and gathers log-probabilities where they are wanted.

    What a row gets does not depend on its place in the batch nor on the other rows. Work that no row asks for is
    skipped at run time: plain temperature costs the noise, greedy rows cost an argmax.

    Args:
        logits: float32[R, V], raw model logits.
        batch: how to treat each row.
        state: what the device knows of each slot; drawing rows are recorded in the returned one, those of drafts not.
        processors: custom logits processors, applied in order (static).
        num_logprobs: k of `top_ids` (static), at most V.
        drafts: where steps may verify drafts, the tokens that rows are behind of.
        typical: a lossy rule by which rows get guesses that follow them (static); None gives them what they draw.
        normalize: gives ``float32[R]``, the log of the sum of the exponentials of rows, in place of `logsumexp`.
    """
    processed = _process(logits, batch, state, processors, drafts)
    random = batch.draws & (batch.temperature > 0)
    scores = lax.cond(
        jnp.any(random),
        lambda: lax.platform_dependent(
            processed,
            batch,
            random,
            None if drafts is None else drafts.drawn(),
            cpu=_perturb_in_blocks,
            default=_perturb,
        ),
        lambda: processed,
    )
    tokens, best = first_largest(scores)
    if typical is not None and drafts is not None and drafts.guessed is not None:
        guessed, depth = drafts.guessed, len(drafts.prefix)
        tokens = lax.cond(
            jnp.any(random & (guessed.parent >= 0)),
            lambda: typical_tokens(tokens, _candidates(processed, batch, random), random, guessed, typical, depth),
            lambda: tokens,
        )
    logprobs = lax.cond(
        jnp.any(batch.want_logprobs > 0),
        lambda: compute_logprobs(
            _scored(logits, batch), jnp.where(batch.draws, tokens, batch.target), num_logprobs, normalize
        ),
        lambda: _no_logprobs(logits.shape[0], num_logprobs),
    )
    output = SamplerOutput(
        tokens=tokens,
        finite=all_finite(logits) & (best < jnp.inf),
        allowed=best != -jnp.inf,
        logprobs=logprobs,
    )
    slot = jnp.where(batch.records, batch.slot, state.last_tokens.shape[0])
    return output, record_tokens(state, slot, tokens, batch.use_counts > 0)


def _scored(logits: jax.Array, batch: SamplingBatch) -> jax.Array:
    """The logits, over the temperature in rows that score with one."""
    return scaled_rows(logits, jnp.where(batch.draws | (batch.temperature == 0), 1.0, batch.temperature))


def first_largest(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(index int32[R] of the first largest value of each row of values[R, V], that value [R]).

    Two plain reductions: XLA's CPU argmax is not vectorised and takes ten times as long. A row with NaN gives V - 1.
    """
    best = jnp.max(values, axis=1)
    last = values.shape[1] - 1
    indices = lax.broadcasted_iota(jnp.int32, values.shape, 1)
    return jnp.min(jnp.where(values == best[:, None], indices, last), axis=1), best


def all_finite(logits: jax.Array) -> jax.Array:
    """bool[R], no NaN and no infinity in the row; the extremes show both."""
    return jnp.isfinite(jnp.max(logits, axis=1)) & jnp.isfinite(jnp.min(logits, axis=1))


def compute_logprobs(
    logits: jax.Array, target: jax.Array, num_logprobs: int, normalize: Normalize | None = None
) -> Logprobs:
    """Log-probabilities of logits[R, V] for target[R] and for the `num_logprobs` best; `normalize` as for `sample`."""
    normalizers = jax.nn.logsumexp(logits, axis=1) if normalize is None else normalize(logits)
    target_logits = jnp.take_along_axis(logits, target[:, None], axis=1)
    top_logits, top_ids = lax.top_k(logits, num_logprobs)
    return Logprobs(
        target_logprobs=target_logits[:, 0] - normalizers,
        target_ranks=1 + jnp.sum(logits > target_logits, axis=1, dtype=jnp.int32),
        top_ids=top_ids,
        top_logprobs=top_logits - normalizers[:, None],
        log_normalizers=normalizers,
    )


def _no_logprobs(num_rows: int, num_logprobs: int) -> Logprobs:
    return Logprobs(
        target_logprobs=jnp.zeros((num_rows,), jnp.float32),
        target_ranks=jnp.zeros((num_rows,), jnp.int32),
        top_ids=jnp.zeros((num_rows, num_logprobs), jnp.int32),
        top_logprobs=jnp.zeros((num_rows, num_logprobs), jnp.float32),
        log_normalizers=jnp.zeros((num_rows,), jnp.float32),
    )


def _process(
    logits: jax.Array,
    batch: SamplingBatch,
    state: SamplingState,
    processors: Sequence[LogitsProcessor],
    drafts: DraftRows | None,
) -> jax.Array:
    """Bias, penalties and processors: what also decides a greedy row."""
    biased = lax.cond(
        jnp.any(batch.use_bias > 0),
        lambda: apply_bias(logits, state.bias.at[batch.slot].get(mode="clip"), batch.use_bias),
        lambda: logits,
    )
    processed = lax.cond(
        jnp.any(batch.use_counts > 0),
        lambda: apply_penalties(biased, _counts(batch, state, drafts), batch),
        lambda: biased,
    )
    context = LogitsContext(batch.slot, batch.position, state.counts, drafts)
    for processor in processors:
        processed = _apply(processor, processed, context)
    return processed


def _counts(batch: SamplingBatch, state: SamplingState, drafts: DraftRows | None) -> jax.Array:
    """int32[R, V], the counts before each row's position."""
    counts = state.counts.at[batch.slot].get(mode="clip")
    return counts if drafts is None else drafts.add_counts(counts)


def _apply(processor: LogitsProcessor, logits: jax.Array, context: LogitsContext) -> jax.Array:
    """One custom processor; what it returns decides about tokens, so its shape is checked when the step is traced."""
    result = processor(logits, context)
    if jnp.shape(result) != logits.shape:
        name = getattr(processor, "__name__", repr(processor))
        raise ValueError(
            f"logits_processors: {name} returned shape {jnp.shape(result)} for logits{logits.shape}; "
            "it must keep the shape [R, V]"
        )
    return jnp.asarray(result, logits.dtype)


def _perturb(processed: jax.Array, batch: SamplingBatch, random: jax.Array, drawn: DrawnDrafts | None) -> jax.Array:
    """Gumbel-max: the largest of the result is a sample of the filtered softmax, or what rejection sampling decides.
    Rows not `random` stay as they are."""
    candidates = _candidates(processed, batch, random)
    noise = gumbel_noise(batch.seed_lo, batch.seed_hi, batch.child_index, batch.position, processed.shape[1])
    scores = candidates + noise if drawn is None else rejection_scores(candidates, noise, batch, drawn)
    return jnp.where(random[:, None], scores, processed)


def _candidates(processed: jax.Array, batch: SamplingBatch, random: jax.Array) -> jax.Array:
    """float32[R, V], scaled, -inf for what `random` rows may not draw."""
    scaled = processed / jnp.where(random, batch.temperature, 1.0)[:, None]
    return keep_candidates(scaled, batch.top_k, batch.top_p, batch.min_p, random)


def _perturb_in_blocks(
    processed: jax.Array, batch: SamplingBatch, random: jax.Array, drawn: DrawnDrafts | None
) -> jax.Array:
    """`_perturb`, some rows after the others. It needs several arrays of the logits' size: for all rows they would come
    from memory, and from pages that malloc has just got from the system, which takes longer than the arithmetic.
    """
    size = math.gcd(processed.shape[0], CPU_BLOCK)
    blocks = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), (processed, batch, random, drawn))
    return lax.map(lambda block: _perturb(*block), blocks).reshape(processed.shape)
