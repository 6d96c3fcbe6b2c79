"""The decoder: one Flax Linen module for every family, for serving and for training."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.attention import AttentionFn, Cache, SelfAttention
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.embedding import Embedding
from jaxinfer.models.linear import Linear
from jaxinfer.models.mlp import GatedMLP
from jaxinfer.models.norm import RMSNorm
from jaxinfer.models.rope import Rotation, rotation
from jaxinfer.typing import Params


class DecoderLayer(nn.Module):
    """Pre-norm transformer block: ``x + attn(norm(x))``, then ``x + mlp(norm(x))``; ``x[T, D]``."""

    config: ModelConfig
    param_dtype: jnp.dtype = jnp.float32
    sum_over: str | None = None

    @nn.compact
    def __call__(
        self, x: jax.Array, angles: Rotation, attend: AttentionFn[Cache], cache: Cache
    ) -> tuple[jax.Array, Cache]:
        c = self.config
        normed = RMSNorm(c.rms_norm_eps, self.param_dtype, name="attn_norm")(x)
        mixed, cache = SelfAttention(c, self.param_dtype, self.sum_over, name="attn")(normed, angles, attend, cache)
        x = x + mixed
        norm = RMSNorm(c.rms_norm_eps, self.param_dtype, name="mlp_norm")
        return x + GatedMLP(c, self.param_dtype, self.sum_over, name="mlp")(x, norm), cache


@partial(jax.jit, static_argnums=0)
def apply_layer(
    layer: DecoderLayer, params: Params, x: jax.Array, angles: Rotation, attend: AttentionFn[Cache], cache: Cache
) -> tuple[jax.Array, Cache]:
    """One layer as a function of its own: traced and lowered once, called `num_hidden_layers` times."""
    result: Any = layer.apply({"params": params}, x, angles, attend, cache)
    return result


class Decoder(nn.Module):
    """A decoder-only transformer over a flat list of tokens.

    The layers are a Python loop over per-layer parameters: scanned over stacked weights, XLA would copy every layer's
    weights each step.

    Attributes:
        config: the architecture.
        param_dtype: dtype of freshly initialised parameters; activations follow the parameters given to `apply`.
        sum_over: inside `jax.shard_map`, the mesh axis over which KV heads and feed-forward channels are split; then
            `config` says what one device has of them.
    """

    config: ModelConfig
    param_dtype: jnp.dtype = jnp.float32
    sum_over: str | None = None

    def setup(self) -> None:
        c = self.config
        self.embed = Embedding(c.vocab_size, c.hidden_size, self.param_dtype)
        self.layers = [DecoderLayer(c, self.param_dtype, self.sum_over) for _ in range(c.num_hidden_layers)]
        self.final_norm = RMSNorm(c.rms_norm_eps, self.param_dtype)
        if not c.tie_word_embeddings:
            self.lm_head = Linear((c.vocab_size,), (c.hidden_size,), False, self.param_dtype)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, attend: AttentionFn[Cache], caches: Sequence[Cache]
    ) -> tuple[jax.Array, list[Cache]]:
        """Hidden states after the last norm.

        Args:
            tokens: int32[T].
            positions: int32[T], position of each token in its own sequence.
            attend: attention over a layer's cache.
            caches: one entry a layer.

        Returns:
            hidden[T, D], and the caches with the new keys and values.
        """
        x = self.embed(tokens)
        angles = rotation(self.config, positions)
        written = []
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            if self.is_initializing():
                x, cache = layer(x, angles, attend, cache)
            else:
                params = self.variables["params"][f"layers_{index}"]
                block = DecoderLayer(self.config, sum_over=self.sum_over, parent=None)
                x, cache = apply_layer(block, params, x, angles, attend, cache)
            written.append(cache)
        return self.final_norm(x), written

    def logits(self, hidden: jax.Array) -> jax.Array:
        """``hidden[R, D] -> float32[R, V]``."""
        head = self.embed.logits if self.config.tie_word_embeddings else self.lm_head
        return head(hidden).astype(jnp.float32)

    def _forward(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        def no_attention(qkv: jax.Array, angles: Rotation, cache: None) -> tuple[jax.Array, None]:
            return qkv[:, :, :-2], cache

        hidden, _ = self(tokens, positions, jax.tree_util.Partial(no_attention), [None] * self.config.num_hidden_layers)
        return self.logits(hidden)


def init_params(config: ModelConfig, rng: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Fresh random parameters in the tree that checkpoints are loaded into and `LLM(params=...)` takes."""
    tokens = jnp.zeros((1,), jnp.int32)
    return Decoder(config, jnp.dtype(dtype)).init(rng, tokens, tokens, method=Decoder._forward)["params"]


def param_shapes(config: ModelConfig, dtype: Any = jnp.float32) -> Params:
    """The parameter tree as `jax.ShapeDtypeStruct` leaves; allocates nothing."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0), dtype))
