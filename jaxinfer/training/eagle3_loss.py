"""What an EAGLE-3 head learns from the frozen model that it belongs to."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.eagle3 import Eagle3Config, Eagle3Head
from jaxinfer.models.sequence import SequenceDecoder, sequence_positions
from jaxinfer.training.acceptance import chain_length
from jaxinfer.training.chunks import over_tokens
from jaxinfer.training.distillation_loss import cast, flat_rows
from jaxinfer.training.features import model_logits, token_places
from jaxinfer.training.head_losses import ahead, before, draft_weights
from jaxinfer.training.logprobs import head_params
from jaxinfer.training.packing import PADDING
from jaxinfer.training.step import Sums
from jaxinfer.training.unrolled_attention import UnrolledAttention
from jaxinfer.typing import Params


def tapped_features(
    config: ModelConfig, taps: tuple[int, ...], params: Params, ids: jax.Array, segments: jax.Array
) -> jax.Array:
    """The model's hidden states at `taps` (see `Eagle3Config`), and that after its last norm: ``[B, T, (n + 1) D]``,
    which no gradients go through."""
    decoder = SequenceDecoder(config)
    states = [decoder.embed(params, ids, segments)]
    for index in range(config.num_hidden_layers):
        states.append(decoder.layer(index, params[f"layers_{index}"], states[-1], segments))
    last: Any = Decoder(config).apply({"params": head_params(params)}, flat_rows(states[-1]), method=Decoder.normed)
    found = [*(states[tap] for tap in taps), last.reshape(states[-1].shape)]
    return jax.lax.stop_gradient(jnp.concatenate(found, axis=-1))


@dataclass(frozen=True)
class Eagle3Loss:
    """EAGLE-3's: at every place the head drafts `unroll` tokens, each from its own output before it, and is compared
    with the model by what they say alone ("training-time test", arXiv:2503.01840, section 3.2); a
    `jaxinfer.training.step.Loss`.

    As in the engine, the head is given each token with the feature of the one before it, a text's first with zeros.

    Trained is the head; frozen is the model, or, where a batch brings "features" of `tapped_features`, its token table
    and output head. With a draft vocabulary frozen has what `cut_output` gives for it: the model's distribution is that
    over these tokens, and places whose next token is another one are not learned from.

    Sums: "loss", cross-entropies with the model's distributions, of which each guess of a draft adds `decay` times as
    much as the one before; "top1_k", how often guess k from 0 is the text's token; and "length", the tokens that a step
    would yield (`chain_length`).

    Attributes:
        model: architecture of the frozen model.
        head: of the head.
        unroll: guesses of a draft.
        decay: weight of a guess against that of the one before it.
        dtype: in which the head computes.
    """

    model: ModelConfig
    head: Eagle3Config
    unroll: int = 5
    decay: float = 0.8
    dtype: str = "float32"

    def __call__(self, trained: Any, frozen: Any, batch: Any) -> Sums:
        ids, segments = batch["ids"], batch["segments"]
        if "features" in batch:
            states = batch["features"].astype(self.dtype)
        else:
            states = tapped_features(self.model, self.head.taps, frozen, ids, segments).astype(self.dtype)
        *tapped, last = jnp.split(states, len(self.head.taps) + 1, axis=-1)
        params = cast(trained, self.dtype)
        begun = draft_weights(batch)
        loss, hits = jnp.zeros(()), []
        for step, guess in enumerate(self._guesses(params, frozen, tapped, ids, segments)):
            rows = {"guess": guess, "true": flat_rows(ahead(last, step, 0)), "token": ahead(ids, step + 1, 0)}
            rows["token"] = rows["token"].reshape(-1)
            found = over_tokens(lambda part: self._of_tokens(params, frozen, part), rows)
            there = (ahead(segments, step + 1, PADDING) == segments).astype(jnp.float32)
            weight = (there * begun).reshape(-1)
            loss += self.decay**step * jnp.sum(found["loss"] * weight)
            hits.append(found["hit"] * weight)
        length = jnp.sum(chain_length(jnp.stack(hits, axis=-1)) * begun.reshape(-1))
        sums = {"weight": begun.sum(), "loss": loss, "length": length}
        return sums | {f"top1_{step}": hit.sum() for step, hit in enumerate(hits)}

    def _guesses(
        self, params: Params, frozen: Params, tapped: list[jax.Array], ids: jax.Array, segments: jax.Array
    ) -> Iterator[jax.Array]:
        """For each step of a draft, guessed features ``[B T, D]``."""
        batch, length = ids.shape
        head, variables = Eagle3Head(self.head), {"params": params}
        fused: Any = head.apply(variables, [flat_rows(state) for state in tapped], method=Eagle3Head.fuse)
        x = flat_rows(before(fused.reshape(batch, length, -1), segments))
        positions = sequence_positions(batch, length, segments).reshape(-1)
        attend, caches = UnrolledAttention(segments, batch), [()]
        for step in range(self.unroll):
            following = ahead(ids, step, 0).reshape(-1)
            embedded: Any = Decoder(self.model).apply(
                {"params": {"embed": frozen["embed"]}}, following, None, method=Decoder.embedded
            )
            out: Any = head.apply(variables, x, embedded.astype(self.dtype), positions + step, attend, caches)
            x, caches = out
            yield x

    def _of_tokens(self, params: Params, frozen: Params, part: Any) -> dict[str, jax.Array]:
        says: Any = Eagle3Head(self.head).apply({"params": params}, part["guess"], method=Eagle3Head.logits)
        target = jax.nn.softmax(model_logits(self.model, frozen, part["true"]))
        place, known = token_places(frozen, part["token"])
        loss = jnp.where(known, -jnp.sum(target * jax.nn.log_softmax(says), axis=-1), 0.0)
        return {"loss": loss, "hit": (known & (jnp.argmax(says, axis=-1) == place)).astype(jnp.float32)}
