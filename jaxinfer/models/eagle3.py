"""The EAGLE-3 head: a layer that guesses the model's next tokens from hidden states of several of its layers, and from
its own outputs further on (arXiv:2503.01840)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.attention import AttentionFn, Cache, SelfAttention
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.embedding import Embedding
from jaxinfer.models.linear import Linear
from jaxinfer.models.mlp import MLP
from jaxinfer.models.norm import Norm
from jaxinfer.models.rope import rotation
from jaxinfer.typing import Params

FEWEST_LAYERS = 7
"""Below, the layers that the paper reads from are not three different ones in ascending order."""


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes of an EAGLE-3 head.

    Args:
        layer: architecture of its one layer, with `vocab_size` that of the model it belongs to, V.
        target_hidden_size: width of that model, D'.
        draft_vocab_size: tokens that it guesses among, U.
        taps: which of the model's hidden states it is given: j is what goes into layer j (from 0), and the number of
            layers is what comes out of the last one, before its norm.
        norm_before_residual: the feature is normed before it goes into the residual stream, too.
        own_embedding: it has a token table of its own; else it is given the model's rows.

    Raises:
        ValueError: a number is out of range, or a table has to be its own.
    """

    layer: ModelConfig
    target_hidden_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    norm_before_residual: bool = False
    own_embedding: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.draft_vocab_size <= self.layer.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} must be 1 to vocab_size={self.layer.vocab_size}"
            )
        if not self.taps or min(self.taps) < 0:
            raise ValueError(f"taps={self.taps} must name at least one hidden state, from 0 up")
        if self.target_hidden_size != self.layer.hidden_size and not self.own_embedding:
            raise ValueError(
                f"target_hidden_size={self.target_hidden_size} and the head's hidden_size={self.layer.hidden_size} "
                "differ, so the head needs a token table of its own"
            )

    @property
    def feature_size(self) -> int:
        """D of a feature."""
        return self.layer.hidden_size


def eagle3_config(
    model: ModelConfig, draft_vocab_size: int | None = None, taps: tuple[int, ...] | None = None
) -> Eagle3Config:
    """A head for this model: a Llama layer of the model's sizes, whatever its own layers are, as published heads are.

    Args:
        model: architecture of the model.
        draft_vocab_size: tokens that it guesses among; None for all.
        taps: see `Eagle3Config`; None for `default_taps`.
    """
    taps = default_taps(model.num_hidden_layers) if taps is None else taps
    layer = ModelConfig(num_hidden_layers=1, **{name: getattr(model, name) for name in _KEPT})
    return Eagle3Config(layer, model.hidden_size, draft_vocab_size or model.vocab_size, taps)


_KEPT = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "rope_theta", "rms_norm_eps",
)  # fmt: skip


def default_taps(num_layers: int) -> tuple[int, ...]:
    """What goes into the third layer, into the middle one, and into the third from the end, as published heads have
    it; of few layers what goes into the first and the middle one, and what comes out of the last."""
    if num_layers < FEWEST_LAYERS:
        return 0, num_layers // 2, num_layers
    return 2, num_layers // 2, num_layers - 3


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention is given ``[norm(embedding), norm(feature)]``, and that adds to the feature."""

    config: Eagle3Config
    param_dtype: jnp.dtype = jnp.float32

    def setup(self) -> None:
        c = self.config.layer
        self.embed_norm, self.feature_norm, self.mlp_norm = self._norm(), self._norm(), self._norm()
        self.attn = SelfAttention(c, self.param_dtype, in_size=2 * c.hidden_size)
        self.mlp = MLP(c, c.intermediate_size, self.param_dtype)

    def _norm(self) -> Norm:
        c = self.config.layer
        return Norm(c, (c.hidden_size,), use_bias=c.norm_bias, param_dtype=self.param_dtype)

    def __call__(
        self, features: jax.Array, embedded: jax.Array, angles: Any, attend: AttentionFn[Cache], cache: Cache
    ) -> tuple[jax.Array, Cache]:
        normed = self.feature_norm(features)
        both = jnp.concatenate([self.embed_norm(embedded), normed], axis=-1)
        mixed, cache = self.attn(both, angles, attend, cache)
        x = (normed if self.config.norm_before_residual else features) + mixed
        return x + self.mlp(x, self.mlp_norm), cache


class Eagle3Head(nn.Module):
    """`fuse` makes a feature of hidden states, `__call__` the next one of that and the token between, `logits` a guess.

    Parameters: ``fc/kernel[D, len(taps) D']``; ``layers_0/{embed_norm, feature_norm, mlp_norm}/scale[D]``,
    ``layers_0/attn/{qkv, out}/kernel`` with 2 D inputs of qkv, ``layers_0/mlp/{gate_up, down}/kernel`` and biases where
    the architecture has them; ``final_norm/scale[D]``; ``lm_head/kernel[U, D]``; ``embed/embedding[V, D]`` where it has
    its own.
    """

    config: Eagle3Config
    param_dtype: jnp.dtype = jnp.float32

    def setup(self) -> None:
        config, c = self.config, self.config.layer
        size = (c.hidden_size,)
        self.fc = Linear(size, (len(config.taps) * config.target_hidden_size,), False, self.param_dtype)
        self.layers = [Eagle3Layer(config, self.param_dtype)]
        self.final_norm = Norm(c, size, use_bias=c.norm_bias, param_dtype=self.param_dtype)
        self.lm_head = Linear((config.draft_vocab_size,), size, False, self.param_dtype)
        if config.own_embedding:
            self.embed = Embedding(c.vocab_size, c.hidden_size, self.param_dtype)

    def fuse(self, hidden: Sequence[jax.Array]) -> jax.Array:
        """Features ``[T, D]`` of the model's hidden states ``[T, D']`` at `taps`, in their order."""
        fused: jax.Array = self.fc(jnp.concatenate(hidden, axis=-1))
        return fused

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """Rows ``[T, D]`` of its own token table."""
        rows: jax.Array = self.embed(tokens)
        return rows

    def __call__(
        self,
        features: jax.Array,
        embedded: jax.Array,
        positions: jax.Array,
        attend: AttentionFn[Cache],
        caches: Sequence[Cache],
    ) -> tuple[jax.Array, list[Cache]]:
        """Guessed features ``[T, D]``, each of the place after its feature's, and the caches.

        Args:
            features: [T, D], of `fuse` or guessed before.
            embedded: [T, D], embeddings of the tokens one place after the features.
            positions: int32[T], of the features, or all of them by the same number off.
            attend: attention over the layer's cache.
            caches: one entry.
        """
        c = self.config.layer
        angles = rotation(c, positions, c.layer_kind(0).rope)
        x, cache = self.layers[0](features, embedded, angles, attend, caches[0])
        return x, [cache]

    def logits(self, features: jax.Array) -> jax.Array:
        """float32[T, U] of guessed ``features[T, D]``, over the tokens that it guesses among."""
        logits: jax.Array = self.lm_head(self.final_norm(features))
        return logits.astype(jnp.float32)

    def _forward(self, hidden: Sequence[jax.Array], tokens: jax.Array, attend: AttentionFn[None]) -> jax.Array:
        features = self.fuse(hidden)
        embedded = self.embedded(tokens) if self.config.own_embedding else features
        out, _ = self(features, embedded, tokens, attend, [None])
        return self.logits(out)


def init_eagle3(config: Eagle3Config, rng: jax.Array) -> Params:
    """Fresh float32 parameters."""

    def no_attention(qkv: jax.Array, angles: Any, cache: None, sight: Any) -> tuple[jax.Array, None]:
        return qkv[:, :, :-2].reshape(qkv.shape[0], -1, qkv.shape[-1]), cache

    hidden = [jnp.zeros((1, config.target_hidden_size))] * len(config.taps)
    tokens = jnp.zeros(1, jnp.int32)
    return Eagle3Head(config).init(rng, hidden, tokens, no_attention, method=Eagle3Head._forward)["params"]
