"""Tree rows: which tokens of its own row a token of a step sees, as bits. HOST, but for `unpack_tree`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.plan import ScheduledRow


def num_words(width: int) -> int:
    """int32 words for a row of `width` bits."""
    return -(-width // 32)


def tree_bits(rows: Sequence[ScheduledRow], index: np.ndarray, words: int) -> np.ndarray:
    """int32[T, W]: token t sees the j-th new token of its row iff bit ``j % 32`` of word ``j // 32`` is set; in rows
    without a tree those up to itself. W words say nothing of a row of more than 32 W tokens.

    Args:
        rows: of the step.
        index: int32[T], which new token of its row each one is.
        words: W.
    """
    count = np.clip(index[:, None] + 1 - 32 * np.arange(words), 0, 32).astype(np.int64)
    bits = ((np.int64(1) << count) - 1).astype(np.uint32)
    first = 0
    for row in rows:
        if row.draft.parents:
            bits[first : first + row.num_tokens] = _paths(row.draft.parents, words)
        first += row.num_tokens
    return bits.view(np.int32)


def _paths(parents: Sequence[int], words: int) -> np.ndarray:
    """uint32[1 + N, W] of a tree of N tokens behind its root: each sees the path from the root to itself."""
    seen = [1]
    for index, parent in enumerate(parents):
        seen.append(seen[1 + parent] | 2 << index)
    packed = b"".join(path.to_bytes(4 * words, "little") for path in seen)
    return np.frombuffer(packed, "<u4").reshape(-1, words)


def unpack_tree(bits: jax.Array, width: int) -> jax.Array:
    """bool[T, Qmax] of int32[T, W], for `paged_attention`; `width` is Qmax."""
    column = jnp.arange(width)
    return (bits[:, column // 32] >> (column % 32)) & 1 == 1
