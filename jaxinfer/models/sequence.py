"""Whole sequences through the decoder at once, without a cache: for training, calibration and scoring."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.attention import Sight, split_rotated
from jaxinfer.models.config import LayerKind, ModelConfig
from jaxinfer.models.decoder import Decoder, DecoderLayer
from jaxinfer.models.rope import Rotation, rotation
from jaxinfer.typing import Params
from pallas_kernels.flash_attention import flash_attention


@partial(jax.tree_util.register_dataclass, data_fields=["segments"], meta_fields=["batch", "implementation"])
@dataclass(frozen=True)
class SequenceAttention:
    """Causal attention within each of `batch` sequences of one length, laid end to end (an `AttentionFn`).

    Attributes:
        segments: int32[B, T] or None; a token sees those of its own segment only.
        batch: B.
        implementation: as for `flash_attention`.
    """

    segments: jax.Array | None
    batch: int
    implementation: str | None = None

    def __call__(self, qkv: jax.Array, angles: Rotation, cache: None, sight: Sight) -> tuple[jax.Array, None]:
        q, k, v = (x.reshape(self.batch, -1, *x.shape[1:]) for x in split_rotated(qkv, angles))
        out: Any = flash_attention(
            q,
            k,
            v,
            causal=True,
            window=sight.window,
            softcap=sight.softcap,
            scale=sight.scale,
            segment_ids=self.segments,
            implementation=self.implementation,
        )
        return out.reshape(-1, *out.shape[2:]), cache


@dataclass(frozen=True)
class SequenceDecoder:
    """The decoder over ``ids[B, T]``: pure, differentiable functions of the parameters, of the engine's own modules.

    ``embed``, ``layer`` for each layer in turn, and ``head`` are what `__call__` consists of; each needs its own part
    of the parameters only, so that a model larger than the device can be walked a layer at a time.

    Attention is causal: padding at the end of a row changes nothing before it. Where several texts share a row,
    `segments`, int32[B, T], tells them apart: a token sees those of its own segment only, and positions start anew
    wherever the number changes.

    Attributes:
        config: the architecture.
        implementation: of the attention, as for `flash_attention`; None chooses for the device.
    """

    config: ModelConfig
    implementation: str | None = None

    def __call__(self, params: Params, ids: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        """Logits float32[B, T, V]."""
        return self.head(params, self.hidden(params, ids, segments))

    def hidden(self, params: Params, ids: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        """What `head` takes, ``[B, T, D]``: the last layer's output."""
        x = self.embed(params, ids, segments)
        for index in range(self.config.num_hidden_layers):
            x = self.layer(index, params[f"layers_{index}"], x, segments)
        return x

    def embed(self, params: Params, ids: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        """What the first layer takes, ``[B, T, D]``.

        Args:
            params: with "embed", and "embed_positions" where positions are learned; others are not looked at.
            ids: int32[B, T], checked; a learned position must exist for each column.
            segments: int32[B, T] or None.
        """
        batch, length = ids.shape
        positions = sequence_positions(batch, length, segments).reshape(-1)
        flat: Any = Decoder(self.config).apply({"params": params}, ids.reshape(-1), positions, method=Decoder.embedded)
        return flat.reshape(batch, length, -1)

    def layer(self, index: int, params: Params, x: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        """Layer `index` (from 0) over ``x[B, T, D]``; same shape.

        Args:
            index: which; layers of one kind share a compiled program.
            params: of this layer alone.
            x: of `embed`, or the layer before.
            segments: as given to `embed`.
        """
        return _run_layer(self.config, self.config.layer_kind(index), self.implementation, params, x, segments)

    def head(self, params: Params, x: jax.Array) -> jax.Array:
        """Logits float32[..., V] of ``x[..., D]`` after the last layer: final norm and output head.

        Args:
            params: with "final_norm", and "lm_head", or "embed" where it is the head; others are not looked at.
            x: of any rows of what the last layer gave.
        """

        def last(decoder: Decoder, rows: jax.Array) -> jax.Array:
            return decoder.logits(decoder.normed(rows))

        flat: Any = Decoder(self.config).apply({"params": params}, x.reshape(-1, x.shape[-1]), method=last)
        return flat.reshape(*x.shape[:-1], -1)


def run_layer(
    config: ModelConfig,
    kind: LayerKind,
    implementation: str | None,
    params: Params,
    x: jax.Array,
    segments: jax.Array | None,
) -> jax.Array:
    """One layer of this kind over ``x[B, T, D]``, see `SequenceDecoder.layer`, as part of a caller's program."""
    batch, length, width = x.shape
    angles = rotation(config, sequence_positions(batch, length, segments).reshape(-1), kind.rope)
    attend = SequenceAttention(segments, batch, implementation)
    block = DecoderLayer(config, kind, parent=None)
    out, _ = block.apply({"params": params}, x.reshape(-1, width), angles, attend, None)
    return out.reshape(x.shape)


_run_layer = jax.jit(run_layer, static_argnums=(0, 1, 2))


def sequence_positions(batch: int, length: int, segments: jax.Array | None = None) -> jax.Array:
    """int32[B, T]: the place of each token in its segment, in its row where there are no segments."""
    places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    if segments is None:
        return places
    starts = jnp.concatenate([jnp.ones((batch, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    return places - jax.lax.cummax(jnp.where(starts, places, 0), axis=1)
