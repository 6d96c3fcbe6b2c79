"""The KV write in plain jax.numpy: the specification, and on a donated pool already in place."""

import jax
import jax.numpy as jnp


def kv_write_reference(
    k: jax.Array, v: jax.Array, pages: jax.Array, page_ids: jax.Array, offsets: jax.Array
) -> jax.Array:
    """Same contract as `kv_write`."""
    k, v = k.astype(pages.dtype), v.astype(pages.dtype)
    finite = jnp.all(jnp.isfinite(k) & jnp.isfinite(v), axis=-1, keepdims=True)
    k, v = jnp.where(finite, k, jnp.nan), jnp.where(finite, v, 0)
    interleaved = jnp.stack([k, v], axis=2).reshape(k.shape[0], -1, k.shape[-1])  # [T, 2K, H]: rows 2h and 2h + 1
    return pages.at[page_ids, :, offsets].set(interleaved, mode="promise_in_bounds")
