"""The public operation: documentation and checks."""

import jax

from pallas_kernels.kv_write.reference import kv_write_reference


def kv_write(k: jax.Array, v: jax.Array, pages: jax.Array, page_ids: jax.Array, offsets: jax.Array) -> jax.Array:
    """Scatters the keys and values of a step's tokens into their pages, in place when `pages` is donated.

    Where a head's key or value of a token holds NaN or infinity, its key becomes NaN and its value 0. Attention weights
    a position that is not visible with 0 but still multiplies its value, and 0 * NaN would reach every row that is
    handed the page later; a NaN key is masked away for those rows, and makes NaN of every row that does see the token.

    Args:
        k, v: [T, K, H], rotated keys and values.
        pages: [P, 2K, S, H], keys of head h in row 2h, values in row 2h + 1.
        page_ids: int32[T], page of each token; padding tokens name page 0, the sink nobody reads.
        offsets: int32[T], position within the page, 0 .. S - 1.

    Returns:
        pages with the tokens written, in the pool's dtype.

    Raises:
        ValueError: shapes that do not fit together.
    """
    tokens, heads, head_dim = k.shape
    if v.shape != k.shape or pages.shape[1] != 2 * heads or pages.shape[3] != head_dim:
        raise ValueError(f"k{k.shape} and v{v.shape} must be [T, K, H] and pages{pages.shape} [P, 2K, S, H]")
    if page_ids.shape != (tokens,) or offsets.shape != (tokens,):
        raise ValueError(f"page_ids{page_ids.shape} and offsets{offsets.shape} must be ({tokens},)")
    return kv_write_reference(k, v, pages, page_ids, offsets)
