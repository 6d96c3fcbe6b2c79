"""The KV write in plain jax.numpy: the specification, and on a donated pool already in place."""

import jax
import jax.numpy as jnp

from pallas_kernels.kv_format import format_of, mark_nonfinite, quantize


def kv_write_reference(
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    scales: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Same contract as `kv_write`."""
    kv_format = format_of(pages.dtype)
    if kv_format is None:
        k, v = mark_nonfinite(k.astype(pages.dtype), v.astype(pages.dtype))
        return _scatter(k, v, pages, page_ids, offsets)
    k, v = mark_nonfinite(k, v)
    (k_codes, k_scales), (v_codes, v_scales) = quantize(k, kv_format), quantize(v, kv_format)
    assert scales is not None
    return (
        _scatter(k_codes, v_codes, pages, page_ids, offsets),
        _scatter(k_scales, v_scales, scales, page_ids, offsets),
    )


def rope_kv_write_reference(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    scales: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Same contract as `rope_kv_write`."""
    tokens, heads, rows, head_dim = qkv.shape
    rotated = rotate_half(qkv[:, :, : rows - 1], cos, sin)
    q = rotated[:, :, : rows - 2].reshape(tokens, heads * (rows - 2), head_dim)
    written = kv_write_reference(rotated[:, :, rows - 2], qkv[:, :, rows - 1], pages, page_ids, offsets, scales=scales)
    return (q, *written) if isinstance(written, tuple) else (q, written)


def rotate_half(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first R channels of ``x[T, ..., H]`` by the angles ``[T, R / 2]`` of its token, in float32."""
    half = cos.shape[-1]
    broadcast = (cos.shape[0],) + (1,) * (x.ndim - 2) + (half,)
    cos, sin = cos.reshape(broadcast), sin.reshape(broadcast)
    first, second = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., 2 * half :]], axis=-1)


def _scatter(k: jax.Array, v: jax.Array, pool: jax.Array, page_ids: jax.Array, offsets: jax.Array) -> jax.Array:
    """Writes ``k, v[T, K, ...]`` to rows 2h and 2h + 1 of ``pool[P, 2K, S, ...]``."""
    interleaved = jnp.stack([k, v], axis=2).reshape(k.shape[0], 2 * k.shape[1], *k.shape[2:])
    return pool.at[page_ids, :, offsets].set(interleaved, mode="promise_in_bounds")
