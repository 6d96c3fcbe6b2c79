"""The EAGLE head: a model's next hidden state, guessed from its last one and the token that came after it
(arXiv:2401.15077)."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.attention import AttentionFn, Cache, SelfAttention
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.linear import Linear
from jaxinfer.models.mlp import MLP
from jaxinfer.models.norm import Norm
from jaxinfer.models.rope import rotation
from jaxinfer.typing import Params


def eagle_config(model: ModelConfig) -> ModelConfig:
    """The architecture of a head for this model: one of its layers.

    Raises:
        ValueError: the model's layers are not of the kind that EAGLE heads are: norms before attention and MLP, one
            after the other, a dense MLP and rotated positions.
    """
    plain = model.pre_norms and not model.post_norms and model.block == "sequential"
    if not plain or model.num_experts or model.learned_positions:
        raise ValueError(
            "an EAGLE head is a layer with norms before attention and MLP, rotated positions and no experts; this "
            "model has other ones: train Medusa heads or a draft model"
        )
    fields = {name: getattr(model, name) for name in _KEPT}
    return ModelConfig(num_hidden_layers=1, **fields)


_KEPT = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "rope_theta", "rope_freq_factors", "rms_norm_eps", "hidden_act", "qkv_bias", "o_bias",
    "mlp_bias", "tie_word_embeddings", "rotary_dim", "rope_scaling", "rope_length", "norm", "norm_bias",
    "norm_unit_offset", "qk_norm", "attn_softcap", "logit_softcap", "query_scale", "embedding_multiplier",
    "residual_multiplier", "logit_multiplier", "mlp_gated",
)  # fmt: skip


class EagleLayer(nn.Module):
    """A decoder layer over ``x[T, D]`` without a norm before its attention."""

    config: ModelConfig
    param_dtype: jnp.dtype = jnp.float32

    def setup(self) -> None:
        c = self.config
        self.attn = SelfAttention(c, self.param_dtype)
        self.mlp = MLP(c, c.intermediate_size, self.param_dtype)
        self.mlp_norm = Norm(c, (c.hidden_size,), use_bias=c.norm_bias, param_dtype=self.param_dtype)

    def __call__(self, x: jax.Array, angles: Any, attend: AttentionFn[Cache], cache: Cache) -> tuple[jax.Array, Cache]:
        mixed, cache = self.attn(x, angles, attend, cache)
        x = x + mixed
        return x + self.mlp(x, self.mlp_norm), cache


class EagleHead(nn.Module):
    """``layer(fc([embedding of the next token, feature]))``.

    A feature is a model's hidden state after its last norm; the model's output head makes logits of a guessed one
    (`jaxinfer.models.decoder.Decoder.logits`), and its token table the embeddings.

    Attributes:
        config: of `eagle_config`.
        use_bias: whether `fc` adds a bias.
        param_dtype: dtype of freshly initialised parameters.
    """

    config: ModelConfig
    use_bias: bool = True
    param_dtype: jnp.dtype = jnp.float32

    def setup(self) -> None:
        c = self.config
        self.fc = Linear((c.hidden_size,), (2 * c.hidden_size,), self.use_bias, self.param_dtype)
        self.layers = [EagleLayer(c, self.param_dtype)]

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
            features: [T, D], of the model or guessed before.
            embedded: [T, D], embeddings of the tokens one place after the features.
            positions: int32[T], of the features.
            attend: attention over the layer's cache.
            caches: one entry.
        """
        x = self.fc(jnp.concatenate([embedded, features], axis=-1))
        kind = self.config.layer_kind(0)
        x, cache = self.layers[0](x, rotation(self.config, positions, kind.rope), attend, caches[0])
        return x, [cache]


def init_eagle(config: ModelConfig, rng: jax.Array, *, use_bias: bool = True) -> Params:
    """Fresh float32 parameters."""

    def no_attention(qkv: jax.Array, angles: Any, cache: None, sight: Any) -> tuple[jax.Array, None]:
        return qkv[:, :, :-2].reshape(qkv.shape[0], -1, qkv.shape[-1]), cache

    row = jnp.zeros((1, config.hidden_size))
    head = EagleHead(config, use_bias)
    return head.init(rng, row, row, jnp.zeros(1, jnp.int32), no_attention, [None])["params"]
