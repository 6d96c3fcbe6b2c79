"""The flash-attn package's function of this name, for code that is written against it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention.api import check_operands, make_spec, run
from pallas_kernels.flash_attention.spec import Masks


def flash_attn_func(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: jax.Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array, None]:
    """Signature and meaning of ``flash_attn.flash_attn_func``, on JAX arrays; see `flash_attention` for the rest.

    Args:
        q: [batch, seqlen_q, nheads, headdim].
        k, v: [batch, seqlen_k, nheads_k, headdim]; nheads_k divides nheads.
        dropout_p: 0 only; dropping attention weights is not supported.
        softmax_scale: factor on the products of queries and keys, 1 / sqrt(headdim) by default.
        causal: aligned to the bottom right corner: query i sees keys up to ``i + seqlen_k - seqlen_q``.
        window_size: (left, right), how far before and after its position a query sees; -1 for no limit.
        softcap: bound of the logits, 0 for none.
        alibi_slopes: float32[nheads] or [batch, nheads]; ``slope * |i + seqlen_k - seqlen_q - j|`` is taken off the
            logit of query i and key j. Not differentiated.
        deterministic: accepted; the gradients are deterministic either way.
        return_attn_probs: also return the log-sum-exp, and None in place of the attention weights, which flash-attn
            fills in for its tests of dropout only.

    Returns:
        [batch, seqlen_q, nheads, headdim], 0 for queries that see no key; with `return_attn_probs` a triple of it,
        the log-sum-exp float32[batch, nheads, seqlen_q], and None.

    Raises:
        NotImplementedError: ``dropout_p`` above 0.
        ValueError: arguments that do not fit together.
    """
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p={dropout_p} is not supported: pass 0.0 and drop out the result instead")
    if not isinstance(window_size, Sequence) or len(window_size) != 2 or min(window_size) < -1:
        raise ValueError(f"window_size={window_size} must be (left, right) from 0 up, -1 for no limit")
    if softcap < 0:
        raise ValueError(f"softcap={softcap} must be above 0, or 0.0 for no cap")
    del deterministic
    check_operands(q, k, v)
    window = tuple(None if side == -1 else side for side in window_size)
    spec = make_spec(q, causal=causal, window=(window[0], window[1]), softcap=softcap or None, scale=softmax_scale)
    masks = Masks(slopes=_slopes(q, alibi_slopes))
    out, lse = run(q, k, v, masks, spec, with_lse=return_attn_probs, implementation=None)
    return out if lse is None else (out, lse, None)


def _slopes(q: jax.Array, alibi_slopes: jax.Array | None) -> jax.Array | None:
    """As float32[B, N]."""
    if alibi_slopes is None:
        return None
    batch, heads = q.shape[0], q.shape[2]
    if alibi_slopes.shape not in ((heads,), (batch, heads)):
        raise ValueError(f"alibi_slopes{alibi_slopes.shape} must be ({heads},) or ({batch}, {heads})")
    return jnp.broadcast_to(jax.lax.stop_gradient(alibi_slopes.astype(jnp.float32)), (batch, heads))
