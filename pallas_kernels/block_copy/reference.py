"""The page copy in plain jax.numpy: the specification, and on a donated pool in place but for the copied pages."""

import jax


def block_copy_reference(
    pages: jax.Array, source_ids: jax.Array, target_ids: jax.Array, *, scales: jax.Array | None = None
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Same contract as `block_copy`."""
    copied = pages.at[target_ids].set(pages[source_ids], mode="promise_in_bounds")
    if scales is None:
        return copied
    return copied, scales.at[target_ids].set(scales[source_ids], mode="promise_in_bounds")
