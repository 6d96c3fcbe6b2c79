"""What a call asks for, and which keys a query sees: shared by all implementations."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class AttentionSpec:
    """The static part of a call. Query i stands at position ``i + S - T`` among the S keys.

    Attributes:
        scale: factor on the products of queries and keys.
        softcap: bound of the logits, or None.
        left, right: how far before and after its own position a query sees; None for no limit. Causal is right = 0.
    """

    scale: float
    softcap: float | None = None
    left: int | None = None
    right: int | None = None


class Masks(NamedTuple):
    """The optional operands that shape the logits; none of them is differentiated.

    Attributes:
        q_segments: int32[B, T], kv_segments: int32[B, S]; both or none.
        kv_lengths: int32[B], within 0 .. S.
        slopes: float32[B, N], ALiBi's.
    """

    q_segments: jax.Array | None = None
    kv_segments: jax.Array | None = None
    kv_lengths: jax.Array | None = None
    slopes: jax.Array | None = None

    @property
    def everywhere(self) -> bool:
        """Whether no tile of logits is as simple as a product, so that one loop with all masks is as good as three."""
        return self.q_segments is not None or self.slopes is not None


class Span(NamedTuple):
    """Positions ``start .. stop - 1`` hold all that a tile sees, or is seen by; all of ``full_start .. full_stop - 1``
    without exception, segments left aside. An empty span has start >= stop."""

    start: jax.Array | int
    stop: jax.Array | int
    full_start: jax.Array | int
    full_stop: jax.Array | int


def keys_of(
    spec: AttentionSpec, first: jax.Array | int, last: jax.Array | int, kv_length: jax.Array | int, num_keys: int
) -> Span:
    """Keys seen from the positions ``first .. last``, where only ``kv_length`` of `num_keys` keys exist."""
    end = jnp.minimum(kv_length, num_keys)
    start, stop, full_start, full_stop = jnp.zeros_like(end), end, jnp.zeros_like(end), end
    if spec.left is not None:
        start, full_start = jnp.maximum(first - spec.left, 0), jnp.maximum(last - spec.left, 0)
    if spec.right is not None:
        stop = jnp.clip(last + spec.right + 1, 0, end)
        full_stop = jnp.clip(first + spec.right + 1, 0, end)
    return Span(start, stop, full_start, full_stop)


def queries_of(
    spec: AttentionSpec,
    first: jax.Array | int,
    last: jax.Array | int,
    kv_length: jax.Array | int,
    num_queries: int,
    offset: int,
) -> Span:
    """Query rows that see the keys ``first .. last``; row i stands at position ``i + offset``."""
    start, stop = jnp.zeros_like(kv_length), jnp.full_like(kv_length, num_queries)
    full_start, full_stop = start, stop
    if spec.right is not None:
        start = jnp.maximum(first - spec.right - offset, 0)
        full_start = jnp.maximum(last - spec.right - offset, 0)
    if spec.left is not None:
        stop = jnp.clip(last + spec.left + 1 - offset, 0, num_queries)
        full_stop = jnp.clip(first + spec.left + 1 - offset, 0, num_queries)
    # By products: Pallas takes the literal of a scalar `where` for a boolean.
    stop = stop * jnp.asarray(first < kv_length, jnp.int32)
    full_stop = full_stop * jnp.asarray(last < kv_length, jnp.int32)
    return Span(start, stop, full_start, full_stop)


def sees(
    spec: AttentionSpec,
    positions: jax.Array,
    keys: jax.Array,
    kv_length: jax.Array | int,
    q_segments: jax.Array | None = None,
    kv_segments: jax.Array | None = None,
) -> jax.Array:
    """Whether each query sees each key; all operands broadcast against each other."""
    visible = keys < kv_length
    if spec.right is not None:
        visible = visible & (keys <= positions + spec.right)
    if spec.left is not None:
        visible = visible & (keys >= positions - spec.left)
    if q_segments is not None and kv_segments is not None:
        visible = visible & (q_segments == kv_segments)
    return visible
