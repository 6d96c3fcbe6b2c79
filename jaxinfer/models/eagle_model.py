"""EagleModel: an EAGLE head of any version together with the model that it guesses for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.attention import AttentionFn, Cache
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.eagle import EagleHead
from jaxinfer.models.eagle3 import Eagle3Config, Eagle3Head
from jaxinfer.quant.array import QuantArray, take_rows
from jaxinfer.typing import Params

TOKEN_IDS, CUT_HEAD = "token_ids", "cut_head"


@dataclass(frozen=True)
class EagleModel:
    """Pure functions of parameters, for the engine's step and for its draft loop.

    `params` are the head's: "head", the tree of `EagleHead` or `Eagle3Head`; "token_ids", int32[U], the model's token
    of each guess, where it does not guess among all; "cut_head", ``[U, D]``, the rows of the model's output head that
    these are, for a head without one of its own. `token_params` are the model's "embed", "lm_head" and
    "embed_positions".

    Attributes:
        target: architecture of the model.
        head: of the head: of versions 1 and 2 its layer (`eagle_config`), or that of an EAGLE-3 head.
        use_bias: of `EagleHead`.
    """

    target: ModelConfig
    head: ModelConfig | Eagle3Config
    use_bias: bool = False

    @property
    def layer(self) -> ModelConfig:
        """Architecture of the head's one layer; its hidden size is that of the features."""
        return self.head.layer if isinstance(self.head, Eagle3Config) else self.head

    @property
    def taps(self) -> tuple[int, ...]:
        """Which hidden states of the model `features` needs (`Decoder.tapped`)."""
        return self.head.taps if isinstance(self.head, Eagle3Config) else ()

    def features(self, params: Params, hidden: jax.Array, tapped: Sequence[jax.Array]) -> jax.Array:
        """``[T, D]``, what the head is given of the tokens that the model has computed.

        Args:
            params: see above.
            hidden: [T, D'], after the model's last norm.
            tapped: [T, D'] each, its hidden states at `taps`.
        """
        if not isinstance(self.head, Eagle3Config):
            return hidden
        fused: Any = Eagle3Head(self.head).apply({"params": params["head"]}, tapped, method=Eagle3Head.fuse)
        return fused

    def guess(
        self,
        params: Params,
        token_params: Params,
        features: jax.Array,
        tokens: jax.Array,
        positions: jax.Array,
        attend: AttentionFn[Cache],
        cache: Cache,
    ) -> tuple[jax.Array, Cache]:
        """Guessed features ``[T, D]`` of tokens from the features of the tokens before them.

        Args:
            params, token_params: see above.
            features: [T, D], of `features` or guessed; zeros before the first token of a sequence.
            tokens: int32[T].
            positions: int32[T], of the tokens.
            attend: attention over the layer's cache.
            cache: of the layer.

        Returns:
            The guesses and the cache with the new keys and values.
        """
        embedded = self._embedded(params, token_params, tokens, positions).astype(features.dtype)
        module = Eagle3Head(self.head) if isinstance(self.head, Eagle3Config) else EagleHead(self.head, self.use_bias)
        found: Any = module.apply({"params": params["head"]}, features, embedded, positions, attend, [cache])
        out, (cache,) = found
        return out, cache

    def logits(self, params: Params, token_params: Params, features: jax.Array) -> jax.Array:
        """float32[T, U] of guessed ``features[T, D]``: what comes after these tokens, among the guessed ones."""
        logits: Any
        if isinstance(self.head, Eagle3Config):
            logits = Eagle3Head(self.head).apply({"params": params["head"]}, features, method=Eagle3Head.logits)
            return logits
        target = self.target
        if CUT_HEAD in params:
            matrix = params[CUT_HEAD]
            target = replace(target, vocab_size=matrix.shape[0])
            token_params = {"embed": {"embedding": matrix}, "lm_head": {"kernel": matrix}}
        logits = Decoder(target).apply({"params": token_params}, features, method=Decoder.logits)
        return logits

    def tokens(self, params: Params, guesses: jax.Array) -> jax.Array:
        """The model's tokens of guesses: indices into `logits`, int32 of any shape."""
        return params[TOKEN_IDS][guesses] if TOKEN_IDS in params else guesses

    def _embedded(self, params: Params, token_params: Params, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        rows: Any
        if isinstance(self.head, Eagle3Config) and self.head.own_embedding:
            rows = Eagle3Head(self.head).apply({"params": params["head"]}, tokens, method=Eagle3Head.embedded)
        else:
            rows = Decoder(self.target).apply({"params": token_params}, tokens, positions, method=Decoder.embedded)
        return rows


def cut_head(target: ModelConfig, token_params: Params, token_ids: jax.Array, dtype: Any) -> jax.Array:
    """``[U, D]``, the rows of a model's output head for ``token_ids[U]``, as values."""
    matrix = token_params["embed"]["embedding"] if target.tie_word_embeddings else token_params["lm_head"]["kernel"]
    rows = take_rows(matrix, token_ids) if isinstance(matrix, QuantArray) else jnp.take(matrix, token_ids, axis=0)
    return rows.astype(dtype)
