"""What heads for speculation learn from the frozen model that they belong to."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.eagle import EagleHead
from jaxinfer.models.medusa import MedusaConfig, MedusaHeads
from jaxinfer.models.sequence import SequenceAttention, SequenceDecoder, sequence_positions
from jaxinfer.training import losses
from jaxinfer.training.chunks import over_tokens
from jaxinfer.training.distillation_loss import cast, flat_rows, token_weights
from jaxinfer.training.logprobs import head_params
from jaxinfer.training.packing import PADDING
from jaxinfer.training.step import Sums
from jaxinfer.typing import Params


def model_features(config: ModelConfig, params: Params, ids: jax.Array, segments: jax.Array) -> jax.Array:
    """Hidden states after the last norm, ``[B, T, D]``, which no gradients go through."""
    x = SequenceDecoder(config).hidden(params, ids, segments)
    normed: Any = Decoder(config).apply({"params": head_params(params)}, flat_rows(x), method=Decoder.normed)
    return jax.lax.stop_gradient(normed.reshape(x.shape))


def model_logits(config: ModelConfig, params: Params, features: jax.Array) -> jax.Array:
    """Logits float32[T, V] of ``features[T, D]``."""
    logits: Any = Decoder(config).apply({"params": head_params(params)}, features, method=Decoder.logits)
    return logits


@dataclass(frozen=True)
class MedusaLoss:
    """Medusa-1: each head's cross-entropy with the token it guesses, weighted by ``decay ** k`` for head k from 1
    (arXiv:2401.10774, section 2.2.1); a `jaxinfer.training.step.Loss`.

    Trained are the heads, frozen is the model. Sums: "loss"; and for each head from 0 "top1_k", how often its first
    guess is the token, over the weight of all places that have a next token.

    Attributes:
        model: architecture of the frozen model.
        heads: of the heads.
        decay: weight of a head against that of the one before it.
        dtype: in which the heads compute.
    """

    model: ModelConfig
    heads: MedusaConfig
    decay: float = 0.8
    dtype: str = "float32"

    def __call__(self, trained: Any, frozen: Any, batch: Any) -> Sums:
        ids, segments = batch["ids"], batch["segments"]
        features = model_features(self.model, frozen, ids, segments)
        count = self.heads.num_heads
        ahead = jnp.stack([_ahead(ids, k + 2, 0) for k in range(count)], axis=-1)
        there = jnp.stack([_ahead(segments, k + 2, PADDING) == segments for k in range(count)], axis=-1)
        weights = (there & (segments != PADDING)[..., None]).astype(jnp.float32)
        params = cast(trained, self.dtype)
        rows = {"x": flat_rows(features), "targets": flat_rows(ahead)}
        found = over_tokens(lambda part: self._of_tokens(params, frozen, part), rows)
        weights = flat_rows(weights)
        decays = jnp.array([self.decay ** (k + 1) for k in range(count)])
        loss = jnp.sum(found["nll"] * weights * decays)
        hits = jnp.sum(found["hit"] * weights, axis=0)
        sums = {"loss": loss, "weight": token_weights(segments).sum()}
        return sums | {f"top1_{k}": hits[k] for k in range(count)}

    def _of_tokens(self, params: Any, frozen: Any, part: Any) -> dict[str, jax.Array]:
        guesses: Any = MedusaHeads(self.heads).apply({"params": params}, part["x"])
        nll, hit = [], []
        for k, guess in enumerate(guesses):
            logits = guess.astype(jnp.float32) if self.heads.own_heads else model_logits(self.model, frozen, guess)
            target = part["targets"][:, k]
            nll.append(losses.cross_entropy(logits, target))
            hit.append((jnp.argmax(logits, axis=-1) == target).astype(jnp.float32))
        return {"nll": jnp.stack(nll, axis=-1), "hit": jnp.stack(hit, axis=-1)}


@dataclass(frozen=True)
class EagleLoss:
    """EAGLE's: smooth L1 between guessed and true features, and cross-entropy between what the model's output head
    makes of them (arXiv:2401.15077, section 3.2); a `jaxinfer.training.step.Loss`.

    Trained is the head, frozen is the model. A batch may have "noise", uint32[B, 2], a key for each row: then uniform
    noise is added to the features that the head is given, as its own later guesses will be off.

    Sums: "loss"; "regression" and "classification", its terms; and "top1", how often the head's first guess is the
    model's.

    Attributes:
        model: architecture of the frozen model.
        head: of `jaxinfer.models.eagle.eagle_config`.
        use_bias: of the head.
        classification_weight: of the cross-entropy.
        noise: largest absolute value of the noise.
        dtype: in which the head computes.
    """

    model: ModelConfig
    head: ModelConfig
    use_bias: bool = True
    classification_weight: float = 0.1
    noise: float = 0.1
    dtype: str = "float32"

    def __call__(self, trained: Any, frozen: Any, batch: Any) -> Sums:
        ids, segments = batch["ids"], batch["segments"]
        features = model_features(self.model, frozen, ids, segments)
        given = features
        if self.noise and "noise" in batch:
            draw = lambda key: jax.random.uniform(key, features.shape[1:], minval=-self.noise, maxval=self.noise)  # noqa: E731
            given = features + jax.vmap(draw)(batch["noise"]).astype(features.dtype)
        guessed = self.guess(cast(trained, self.dtype), frozen, given[:, :-1], ids[:, 1:], segments[:, :-1])
        rows = {"guess": flat_rows(guessed), "true": flat_rows(features[:, 1:])}
        found = over_tokens(lambda part: self._of_tokens(frozen, part), rows)
        weight = token_weights(segments).reshape(-1)
        return {"weight": weight.sum()} | {name: jnp.sum(values * weight) for name, values in found.items()}

    def guess(
        self, params: Params, frozen: Params, features: jax.Array, following: jax.Array, segments: jax.Array
    ) -> jax.Array:
        """Guessed features ``[B, T, D]`` of the places after these, given the tokens there, int32[B, T]."""
        batch, length = following.shape
        embedded: Any = Decoder(self.model).apply(
            {"params": {"embed": frozen["embed"]}}, following.reshape(-1), None, method=Decoder.embedded
        )
        positions = sequence_positions(batch, length, segments).reshape(-1)
        attend = SequenceAttention(segments, batch)
        x = flat_rows(features).astype(self.dtype)
        head = EagleHead(self.head, self.use_bias)
        out: Any = head.apply({"params": params}, x, embedded.astype(self.dtype), positions, attend, [None])
        return out[0].reshape(features.shape)

    def _of_tokens(self, frozen: Any, part: Any) -> dict[str, jax.Array]:
        guess, true = part["guess"], part["true"]
        says, target = model_logits(self.model, frozen, guess), model_logits(self.model, frozen, true)
        regression = losses.smooth_l1(guess.astype(jnp.float32) - true.astype(jnp.float32))
        classification = -jnp.sum(jax.nn.softmax(target) * jax.nn.log_softmax(says), axis=-1)
        return {
            "loss": regression + self.classification_weight * classification,
            "regression": regression,
            "classification": classification,
            "top1": (jnp.argmax(says, axis=-1) == jnp.argmax(target, axis=-1)).astype(jnp.float32),
        }


def _ahead(values: jax.Array, places: int, fill: int) -> jax.Array:
    """``values[:, t + places]`` at t, and `fill` where there is none."""
    padded = jnp.pad(values, ((0, 0), (0, places)), constant_values=fill)
    return padded[:, places:]
