"""What heads for speculation learn from the frozen model that they belong to."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.eagle import EagleHead
from jaxinfer.models.medusa import MedusaConfig, MedusaHeads
from jaxinfer.models.sequence import SequenceAttention, sequence_positions
from jaxinfer.training import losses
from jaxinfer.training.acceptance import chain_length
from jaxinfer.training.chunks import over_tokens
from jaxinfer.training.distillation_loss import cast, flat_rows, token_weights
from jaxinfer.training.features import given_features, model_logits, token_places
from jaxinfer.training.packing import PADDING
from jaxinfer.training.step import Sums
from jaxinfer.training.unrolled_attention import UnrolledAttention
from jaxinfer.typing import Params


@dataclass(frozen=True)
class MedusaLoss:
    """Medusa-1: each head's cross-entropy with the token it guesses, weighted by ``decay ** k`` for head k from 1
    (arXiv:2401.10774, section 2.2.1); a `jaxinfer.training.step.Loss`.

    Trained are the heads; frozen is the model, or, where a batch brings "features", its output head. Frozen may have
    what `cut_output` gives: then heads are compared by those tokens alone, and others are not learned.

    Sums: "loss"; for each head from 0 "top1_k", how often its first guess is the token, over the weight of all places
    that have a next token; and "length", the tokens that a step would yield there (`chain_length`).

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
        features = given_features(self.model, frozen, batch, self.dtype)
        count = self.heads.num_heads
        tokens = jnp.stack([ahead(ids, k + 2, 0) for k in range(count)], axis=-1)
        there = jnp.stack([ahead(segments, k + 2, PADDING) == segments for k in range(count)], axis=-1)
        begun = place_weights(batch)
        weights = flat_rows(there.astype(jnp.float32) * begun[..., None])
        params = cast(trained, self.dtype)
        rows = {"x": flat_rows(features), "targets": flat_rows(tokens)}
        found = over_tokens(lambda part: self._of_tokens(params, frozen, part), rows)
        decays = jnp.array([self.decay ** (k + 1) for k in range(count)])
        loss = jnp.sum(found["nll"] * weights * decays)
        hits = found["hit"] * weights
        sums = {"loss": loss, "weight": begun.sum(), "length": jnp.sum(chain_length(hits) * begun.reshape(-1))}
        return sums | {f"top1_{k}": jnp.sum(hits[:, k]) for k in range(count)}

    def _of_tokens(self, params: Any, frozen: Any, part: Any) -> dict[str, jax.Array]:
        guesses: Any = MedusaHeads(self.heads).apply({"params": params}, part["x"])
        nll, hit = [], []
        for k, guess in enumerate(guesses):
            places, known = token_places({} if self.heads.own_heads else frozen, part["targets"][:, k])
            logits = guess.astype(jnp.float32) if self.heads.own_heads else model_logits(self.model, frozen, guess)
            nll.append(jnp.where(known, losses.cross_entropy(logits, places), 0.0))
            hit.append((known & (jnp.argmax(logits, axis=-1) == places)).astype(jnp.float32))
        return {"nll": jnp.stack(nll, axis=-1), "hit": jnp.stack(hit, axis=-1)}


@dataclass(frozen=True)
class EagleLoss:
    """EAGLE's: smooth L1 between guessed and true features, and cross-entropy between what the model's output head
    makes of them (arXiv:2401.15077, section 3.2); a `jaxinfer.training.step.Loss`.

    Trained is the head; frozen is the model, or, where a batch brings "features", its token table and output head.
    Frozen may have what `cut_output` gives: then the distributions are those over these tokens alone. A batch may have
    "noise", uint32[B, 2], a key for each row: then uniform noise is added to the features that the head is given, as
    its own later guesses will be off.

    As in the engine, the head is given each token with the feature of the one before it, a text's first with zeros.

    With `unroll` above 1 the head goes on from its own guesses, as it will when it is used (HASS, arXiv:2408.15766): at
    every place a draft of that many tokens, of which each adds to the loss `decay` times as much as the one before.

    Sums: "loss"; "regression" and "classification", its terms; "top1", how often the first guess is the model's, with
    `unroll` also "top1_k" of guess k from 0 on; and "length", the tokens that a step would yield (`chain_length`).

    Attributes:
        model: architecture of the frozen model.
        head: of `jaxinfer.models.eagle.eagle_config`.
        use_bias: of the head.
        classification_weight: of the cross-entropy.
        noise: largest absolute value of the noise.
        dtype: in which the head computes.
        unroll: guesses of a draft.
        decay: weight of a guess against that of the one before it.
    """

    model: ModelConfig
    head: ModelConfig
    use_bias: bool = True
    classification_weight: float = 0.1
    noise: float = 0.1
    dtype: str = "float32"
    unroll: int = 1
    decay: float = 0.8

    def __call__(self, trained: Any, frozen: Any, batch: Any) -> Sums:
        segments = batch["segments"]
        features = given_features(self.model, frozen, batch, self.dtype)
        given = features
        if self.noise and "noise" in batch:
            draw = lambda key: jax.random.uniform(key, features.shape[1:], minval=-self.noise, maxval=self.noise)  # noqa: E731
            given = features + jax.vmap(draw)(batch["noise"]).astype(features.dtype)
        begun = draft_weights(batch)
        sums: dict[str, jax.Array] = {"weight": begun.sum()}
        hits = []
        guesses = self._guesses(cast(trained, self.dtype), frozen, given, batch["ids"], segments)
        for step, guess in enumerate(guesses):
            rows = {"guess": flat_rows(guess), "true": flat_rows(ahead(features, step, 0))}
            found = over_tokens(lambda part: self._of_tokens(frozen, part), rows)
            there = (ahead(segments, step, PADDING) == segments).astype(jnp.float32)
            weight = (there * begun).reshape(-1)
            hits.append(found.pop("top1") * weight)
            for name, values in found.items():
                sums[name] = sums.get(name, 0.0) + self.decay**step * jnp.sum(values * weight)
        sums["top1"] = hits[0].sum()
        if self.unroll > 1:
            sums |= {f"top1_{step}": hit.sum() for step, hit in enumerate(hits)}
        sums["length"] = jnp.sum(chain_length(jnp.stack(hits, axis=-1)) * begun.reshape(-1))
        return sums

    def _guesses(
        self, params: Params, frozen: Params, features: jax.Array, ids: jax.Array, segments: jax.Array
    ) -> Iterator[jax.Array]:
        """For each step of a draft, guessed features ``[B, T, D]`` of the tokens so many places after these."""
        batch, length = ids.shape
        positions = sequence_positions(batch, length, segments).reshape(-1)
        attend: Any = SequenceAttention(segments, batch) if self.unroll == 1 else UnrolledAttention(segments, batch)
        caches: list[Any] = [None if self.unroll == 1 else ()]
        x = flat_rows(before(features, segments))
        for step in range(self.unroll):
            embedded: Any = Decoder(self.model).apply(
                {"params": {"embed": frozen["embed"]}},
                ahead(ids, step, 0).reshape(-1),
                None,
                method=Decoder.embedded,
            )
            head = EagleHead(self.head, self.use_bias)
            out: Any = head.apply({"params": params}, x, embedded.astype(self.dtype), positions + step, attend, caches)
            x, caches = out
            yield x.reshape(features.shape)

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


def place_weights(batch: Any) -> jax.Array:
    """float32[B, T]: 1 where the next token is of the same text and counted."""
    return jnp.pad(token_weights(batch["segments"], batch.get("counted")), ((0, 0), (0, 1)))


def draft_weights(batch: Any) -> jax.Array:
    """float32[B, T]: 1 where a token is counted and not the first of its text: where a draft can begin with it."""
    return jnp.pad(token_weights(batch["segments"], batch.get("counted")), ((0, 0), (1, 0)))


def before(values: jax.Array, segments: jax.Array) -> jax.Array:
    """``values[:, t - 1]`` at t, zeros at the beginning of each text."""
    first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jnp.where(first[..., None], 0, jnp.roll(values, 1, axis=1))


def ahead(values: jax.Array, places: int, fill: int) -> jax.Array:
    """``values[:, t + places]`` at t, and `fill` where there is none."""
    padded = jnp.pad(values, ((0, 0), (0, places)) + ((0, 0),) * (values.ndim - 2), constant_values=fill)
    return padded[:, places:]
