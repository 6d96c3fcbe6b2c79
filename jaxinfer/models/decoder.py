"""The decoder: one Flax Linen module for every family, for serving and for training."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.attention import AttentionFn, Cache, SelfAttention, Sight
from jaxinfer.models.config import LayerKind, ModelConfig
from jaxinfer.models.embedding import Embedding
from jaxinfer.models.linear import Linear
from jaxinfer.models.mlp import MLP
from jaxinfer.models.moe import MixtureOfExperts
from jaxinfer.models.norm import Norm
from jaxinfer.models.rope import Rotation, rotation
from jaxinfer.quant.plan import QuantPlan
from jaxinfer.typing import Params


class DecoderLayer(nn.Module):
    """A transformer block over ``x[T, D]``: attention, then MLP or experts, each added to the residual stream.

    Sequential: ``x + attn(norm(x))``, then ``x + mlp(norm(x))``. Parallel: ``x + attn(norm(x)) + mlp(norm(x))``. The
    norms are before, after (still ahead of the sum), or both, as `config` says.
    """

    config: ModelConfig
    kind: LayerKind
    param_dtype: jnp.dtype = jnp.float32
    sum_over: str | None = None
    splits_experts: bool = False

    def setup(self) -> None:
        c = self.config
        options = self.param_dtype, self.sum_over
        self.attn = SelfAttention(c, *options, window=self.kind.window)
        split = self.splits_experts
        self.mlp = MixtureOfExperts(c, *options, split) if self.kind.moe else MLP(c, c.intermediate_size, *options)
        if c.pre_norms:
            self.attn_norm = self._norm()
            if c.block != "parallel_shared_norm":
                self.mlp_norm = self._norm()
        if c.post_norms:
            self.attn_post_norm = self._norm()
            self.mlp_post_norm = self._norm()

    def _norm(self) -> Norm:
        c = self.config
        return Norm(c, (c.hidden_size,), use_bias=c.norm_bias, param_dtype=self.param_dtype)

    def __call__(
        self, x: jax.Array, angles: Rotation, attend: AttentionFn[Cache], cache: Cache
    ) -> tuple[jax.Array, Cache]:
        c = self.config
        # A norm goes into what it is before, which may do both in one kernel; a norm that two share is computed once.
        shared = self.attn_norm(x) if c.block == "parallel_shared_norm" else None
        norm = self.attn_norm if c.pre_norms and shared is None else None
        mixed, cache = self.attn(x if shared is None else shared, angles, attend, cache, norm)
        if c.post_norms:
            mixed = self.attn_post_norm(mixed)
        mixed = _scaled(mixed, c.residual_multiplier)
        if c.block == "sequential":
            x = x + mixed
        out = self._feed_forward(x, shared)
        if c.post_norms:
            out = self.mlp_post_norm(out)
        out = _scaled(out, c.residual_multiplier)
        return (x + out if c.block == "sequential" else x + mixed + out), cache

    def _feed_forward(self, x: jax.Array, shared: jax.Array | None) -> jax.Array:
        c = self.config
        if shared is not None:
            return self.mlp(shared)
        if not c.pre_norms:
            return self.mlp(x)
        return self.mlp(x, self.mlp_norm)


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    """``x * factor`` with the factor rounded to x's dtype, as the references of these families have it."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


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
        sum_over: inside `jax.shard_map`, the mesh axis over which KV heads, feed-forward channels and the vocabulary
            are split; then `config` says what one device has of them, and `logits` are of its part of the vocabulary.
        splits_experts: over that axis experts are dealt out whole; see `MixtureOfExperts`.
    """

    config: ModelConfig
    param_dtype: jnp.dtype = jnp.float32
    sum_over: str | None = None
    splits_experts: bool = False

    def setup(self) -> None:
        c = self.config
        self.embed = Embedding(c.vocab_size, c.hidden_size, self.param_dtype, self.sum_over)
        if c.learned_positions:
            self.embed_positions = Embedding(c.max_position_embeddings, c.hidden_size, self.param_dtype)
        split = self.sum_over, self.splits_experts
        self.layers = [DecoderLayer(c, kind, self.param_dtype, *split) for kind in c.layer_kinds]
        self.final_norm = Norm(c, (c.hidden_size,), use_bias=c.norm_bias, param_dtype=self.param_dtype)
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
        hidden, written, _ = self.tapped(tokens, positions, attend, caches, ())
        return hidden, written

    def tapped(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attend: AttentionFn[Cache],
        caches: Sequence[Cache],
        taps: Sequence[int],
    ) -> tuple[jax.Array, list[Cache], list[jax.Array]]:
        """`__call__`, and the hidden states ``[T, D]`` at `taps` in their order: j is what goes into layer j, and the
        number of layers is what comes out of the last one."""
        c = self.config
        x = self.embedded(tokens, positions)
        angles = {rope: rotation(c, positions, rope) for rope in sorted({kind.rope for kind in c.layer_kinds})}
        written, seen = [], [x]
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            kind = c.layer_kind(index)
            if self.is_initializing():
                x, cache = layer(x, angles[kind.rope], attend, cache)
            else:
                params = self.variables["params"][f"layers_{index}"]
                block = DecoderLayer(c, kind, sum_over=self.sum_over, splits_experts=self.splits_experts, parent=None)
                x, cache = apply_layer(block, params, x, angles[kind.rope], attend, cache)
            written.append(cache)
            seen.append(x)
        return self.normed(x), written, [seen[tap] for tap in taps]

    def embedded(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """``x[T, D]`` that goes into the first layer, of ``tokens[T]`` at ``positions[T]``."""
        c = self.config
        x = _scaled(self.embed(tokens), c.embedding_multiplier)
        return x + self.embed_positions(positions) if c.learned_positions else x

    def normed(self, x: jax.Array) -> jax.Array:
        """Hidden states of what comes out of the last layer."""
        normed: jax.Array = self.final_norm(x)
        return normed

    def logits(self, hidden: jax.Array) -> jax.Array:
        """``hidden[R, D] -> float32[R, V]``, scaled and capped."""
        c = self.config
        head = self.embed.logits if c.tie_word_embeddings else self.lm_head
        logits = _scaled(head(hidden).astype(jnp.float32), c.logit_multiplier)
        return logits if c.logit_softcap is None else c.logit_softcap * jnp.tanh(logits / c.logit_softcap)

    def _forward(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        def no_attention(qkv: jax.Array, angles: Rotation, cache: None, sight: Sight) -> tuple[jax.Array, None]:
            return qkv[:, :, :-2], cache

        hidden, _ = self(tokens, positions, jax.tree_util.Partial(no_attention), [None] * self.config.num_hidden_layers)
        return self.logits(hidden)


def init_params(config: ModelConfig, rng: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Fresh random parameters in the tree that checkpoints are loaded into and `LLM(params=...)` takes."""
    tokens = jnp.zeros((1,), jnp.int32)
    return Decoder(config, jnp.dtype(dtype)).init(rng, tokens, tokens, method=Decoder._forward)["params"]


def param_shapes(config: ModelConfig, dtype: Any = jnp.float32, plan: QuantPlan | None = None) -> Params:
    """The parameter tree as `jax.ShapeDtypeStruct` leaves, those that the plan quantises as QuantArrays of them;
    allocates nothing.

    All layers with experts are alike in this, and all without: one of each is traced.
    """
    flags = [kind.moe for kind in config.layer_kinds]
    traced = tuple(dict.fromkeys(flags))
    cut = replace(
        config,
        num_hidden_layers=len(traced),
        window_layers=None,
        rope_layers=None,
        moe_layers=traced if config.num_experts else None,
    )
    shapes = dict(jax.eval_shape(lambda: init_params(cut, jax.random.key(0), dtype)))
    layers = {flag: shapes.pop(f"layers_{index}") for index, flag in enumerate(traced)}
    tree = shapes | {
        f"layers_{index}": jax.tree.map(lambda leaf: leaf, layers[flag]) for index, flag in enumerate(flags)
    }
    return tree if plan is None else plan.tree_shapes(tree)
