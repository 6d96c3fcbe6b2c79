"""The specification of flash attention, in plain jax.numpy: all logits at once; slow and obvious."""

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention.spec import AttentionSpec, Masks, sees


def flash_attention_reference(
    q: jax.Array, k: jax.Array, v: jax.Array, masks: Masks, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """Output ``[B, T, N, H]`` in q's dtype and log-sum-exp ``float32[B, N, T]``; JAX differentiates it."""
    num_queries, num_keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    key = jnp.arange(num_keys)
    length = jnp.full(q.shape[0], num_keys) if masks.kv_lengths is None else masks.kv_lengths
    # What lies past the end may be NaN, and 0 * NaN is not 0.
    exists = (key < length[:, None])[:, :, None, None]
    keys, values = (
        jnp.repeat(jnp.where(exists, array, 0).astype(jnp.float32), group, axis=2) for array in (k, v)
    )  # [B, S, N, H]

    position = jnp.arange(num_queries)[:, None] + num_keys - num_queries
    visible = sees(spec, position, key, length[:, None, None])
    if masks.q_segments is not None and masks.kv_segments is not None:
        visible = visible & (masks.q_segments[:, :, None] == masks.kv_segments[:, None, :])
    visible = visible[:, None]  # [B, 1, T, S]

    highest = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), keys, precision=highest) * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * jnp.tanh(logits / spec.softcap)
    if masks.slopes is not None:
        logits = logits - masks.slopes[:, :, None, None] * jnp.abs(position - key)
    largest = jnp.max(jnp.where(visible, logits, -1e30), axis=-1, keepdims=True, initial=-1e30)
    largest = jax.lax.stop_gradient(largest)
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, logits, largest) - largest), 0.0)
    total = weights.sum(-1, keepdims=True)
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    out = jnp.einsum("bnts,bsnh->btnh", weights / total, values, precision=highest)
    lse = jnp.where(seen, largest + jnp.log(total), -jnp.inf)[..., 0]
    return out.astype(q.dtype), lse
