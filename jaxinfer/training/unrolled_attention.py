"""Attention of a head that goes on from its own guesses, at every place of a text at once."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer.models.attention import Sight, split_rotated
from jaxinfer.models.rope import Rotation

KeysValues = tuple[jax.Array, jax.Array]


@partial(jax.tree_util.register_dataclass, data_fields=["segments"], meta_fields=["batch"])
@dataclass(frozen=True)
class UnrolledAttention:
    """An `AttentionFn` for the steps of a draft that begins at every place of `batch` rows at once (HASS,
    arXiv:2408.15766; "training-time test" of EAGLE-3, arXiv:2503.01840).

    In step s from 0, the query of place t is that of the draft that begins there, s tokens later. It sees what step 0
    made of the places up to t of its text, which the model's own states were given for, and of its own draft what the
    steps from 1 on made at t. A draft thus sees nothing that the head does not know when it is used.

    The cache is the keys and values ``[B, T, K, H]`` of the steps before, () at first.

    Attributes:
        segments: int32[B, T].
        batch: B.
    """

    segments: jax.Array
    batch: int

    def __call__(
        self, qkv: jax.Array, angles: Rotation, cache: tuple[KeysValues, ...], sight: Sight
    ) -> tuple[jax.Array, tuple[KeysValues, ...]]:
        q, k, v = (x.reshape(self.batch, -1, *x.shape[1:]) for x in split_rotated(qkv, angles))
        seen = (*cache, (k, v))
        heads, width = k.shape[2:]
        q = q.reshape(*q.shape[:2], heads, -1, width)
        (first_keys, first_values), own = seen[0], seen[1:]
        logits = _capped(jnp.einsum("btkgh,bskh->bkgts", q, first_keys), width, sight)
        logits = jnp.where(self._mask(len(own), sight.window)[:, None, None], logits, -jnp.inf)
        mine = [_capped(jnp.einsum("btkgh,btkh->bkgt", q, keys), width, sight) for keys, _ in own]
        if sight.window is not None:
            mine = [x if len(own) - 1 - step < sight.window else x - jnp.inf for step, x in enumerate(mine)]
        joined = jnp.concatenate([logits, *(x[..., None] for x in mine)], axis=-1)
        weights = jax.nn.softmax(joined, axis=-1).astype(v.dtype)
        length = logits.shape[-1]
        out = jnp.einsum("bkgts,bskh->btkgh", weights[..., :length], first_values)
        for step, (_, values) in enumerate(own):
            out += jnp.einsum("bkgt,btkh->btkgh", weights[..., length + step], values)
        return out.reshape(qkv.shape[0], -1, width), seen

    def _mask(self, depth: int, window: int | None) -> jax.Array:
        """bool[B, T, T]: which places of step 0 the queries of step `depth` see."""
        places = jnp.arange(self.segments.shape[1])
        distance = places[:, None] - places[None, :]
        seen = (distance >= 0) & (self.segments[:, :, None] == self.segments[:, None, :])
        return seen if window is None else seen & (distance + depth < window)


def _capped(logits: jax.Array, width: int, sight: Sight) -> jax.Array:
    scaled = logits.astype(jnp.float32) * (width**-0.5 if sight.scale is None else sight.scale)
    return scaled if sight.softcap is None else sight.softcap * jnp.tanh(scaled / sight.softcap)
