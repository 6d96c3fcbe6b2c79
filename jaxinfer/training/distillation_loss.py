"""The loss of a student that learns from a teacher: its terms, and the teacher's part in memory or from disk."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.sequence import SequenceDecoder
from jaxinfer.training import losses
from jaxinfer.training.acceptance import MEASURED_GUESSES, chain_length, following
from jaxinfer.training.chunks import over_tokens
from jaxinfer.training.features import CUT, CUT_NAMES, cut_output, head_logits, model_logits, token_places
from jaxinfer.training.logprobs import head_params, hidden_states
from jaxinfer.training.packing import PADDING
from jaxinfer.training.step import Sums
from jaxinfer.typing import Params

Objective = Literal["forward_kl", "reverse_kl", "cross_entropy"]
OBJECTIVES: tuple[Objective, ...] = ("forward_kl", "reverse_kl", "cross_entropy")


@dataclass(frozen=True)
class DistillationLoss:
    """A `jaxinfer.training.step.Loss`.

    What is trained: "model", the student's parameters, and "projection", ``[E, D]``, where hidden states of different
    widths are compared. Frozen: the teacher's parameters, or {} where it is not in memory. A batch has "ids" and
    "segments", int32[B, T], "counted" where not every token is learned (`PackedRows`), and without the teacher what
    `TopCache` keeps of those rows.

    A batch may bring the teacher's "features", float[B, T, D] after its last norm; then frozen needs no more than its
    output head. Frozen may have what `cut_output` gives: then those tokens alone are compared and learned.

    Sums: "loss"; "nll", the negative log-probability that the student gives the text; "divergence" and "hidden", the
    terms of the loss; "top1", how often its most probable token is the text's, and "length", the tokens that a step
    yields where it guesses `MEASURED_GUESSES` at a time and the text is what the teacher says (`chain_length`); and
    "weight", the number of tokens that are predicted.

    Attributes:
        student: architecture.
        teacher: architecture.
        objective: what is compared: "forward_kl", "reverse_kl", or "cross_entropy" with the text itself.
        temperature: of both distributions; the divergence is multiplied by its square, which keeps the size of the
            gradients (arXiv:1503.02531).
        hidden_weight: of the difference between the last layers' outputs; 0 for none.
        dtype: in which the student computes; its parameters stay float32.
        remat: compute layers again for the gradients.
        implementation: of the attention.
    """

    student: ModelConfig
    teacher: ModelConfig
    objective: Objective = "forward_kl"
    temperature: float = 1.0
    hidden_weight: float = 0.0
    dtype: str = "float32"
    remat: bool = False
    implementation: str | None = None

    def __call__(self, trained: Any, frozen: Any, batch: Any) -> Sums:
        ids, segments = batch["ids"], batch["segments"]
        decoder = SequenceDecoder(self.student, self.implementation)
        params = cast(trained["model"], self.dtype)
        mine = flat_rows(hidden_states(decoder, params, ids, segments, remat=self.remat)[:, :-1])
        theirs = None
        if "features" in batch:
            theirs = flat_rows(batch["features"][:, :-1]).astype(self.dtype)
        elif len(frozen.keys() - CUT_NAMES):
            theirs = flat_rows(SequenceDecoder(self.teacher, self.implementation).hidden(frozen, ids, segments)[:, :-1])
        top = [flat_rows(batch[name]) for name in ("top_ids", "top_logprobs", "tail") if name in batch]
        tokens = {"student": mine, "teacher": theirs, "targets": ids[:, 1:].reshape(-1), "top": top}
        own = cut_output(self.student, params, frozen[CUT]) if CUT in frozen else head_params(params)
        said = model_logits if "features" in batch else head_logits
        found = over_tokens(lambda part: self._of_tokens(own, frozen, said, part), tokens)
        if self.hidden_weight:
            assert theirs is not None
            found["hidden"] = losses.hidden_loss(mine, jax.lax.stop_gradient(theirs), trained.get("projection"))
            found["loss"] = found["loss"] + self.hidden_weight * found["hidden"]
        weight = token_weights(segments, batch.get("counted"))
        hits = (found["top1"].reshape(weight.shape) * weight).astype(bool)
        found["length"] = chain_length(following(hits, MEASURED_GUESSES)).reshape(-1)
        weight = weight.reshape(-1)
        return {"weight": weight.sum()} | {name: jnp.sum(values * weight) for name, values in found.items()}

    def _of_tokens(self, own: Params, frozen: Any, said: Any, tokens: Any) -> Sums:
        logits = head_logits(self.student, own, tokens["student"])
        places, known = token_places(own, tokens["targets"])
        nll = jnp.where(known, losses.cross_entropy(logits, places), 0.0)
        measured = {"nll": nll, "top1": (known & (jnp.argmax(logits, axis=-1) == places)).astype(jnp.float32)}
        if self.objective == "cross_entropy":
            return {"loss": nll, **measured}
        scaled = logits / self.temperature
        if tokens["top"]:
            compare = losses.forward_kl_top if self.objective == "forward_kl" else losses.reverse_kl_top
            divergence = compare(scaled, *tokens["top"])
        else:
            target = said(self.teacher, frozen, tokens["teacher"]) / self.temperature
            whole = losses.forward_kl if self.objective == "forward_kl" else losses.reverse_kl
            divergence = whole(scaled, target)
        return {"loss": divergence * self.temperature**2, "divergence": divergence, **measured}


@dataclass(frozen=True)
class TextLoss:
    """A `Loss` of parameters by themselves: "loss" and "nll", the negative log-probability of the text."""

    model: ModelConfig
    implementation: str | None = None

    def __call__(self, trained: Any, frozen: Any, batch: Any) -> Sums:
        own = DistillationLoss(self.model, self.model, "cross_entropy", implementation=self.implementation)
        return own(
            {"model": trained}, {}, {name: batch[name] for name in ("ids", "segments", "counted") if name in batch}
        )


def top_scores(
    config: ModelConfig, params: Params, batch: Any, k: int, temperature: float, implementation: str | None = None
) -> dict[str, jax.Array]:
    """What `TopCache` keeps of a teacher: see `Score`. Exact at this temperature, the tail's share included.

    Args:
        config: of the teacher.
        params: its parameters.
        batch: "ids" and "segments", int32[B, T].
        k: tokens of each place, below the vocabulary's size.
        temperature: of the distribution.
        implementation: of the attention.
    """
    decoder = SequenceDecoder(config, implementation)
    x = decoder.hidden(params, batch["ids"], batch["segments"])[:, :-1]

    def of_tokens(rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return losses.top_logprobs(decoder.head(head_params(params), rows) / temperature, k)

    found = over_tokens(of_tokens, flat_rows(x))
    ids, logprobs, tail = (array.reshape(*x.shape[:2], *array.shape[1:]) for array in found)
    return {"top_ids": ids, "top_logprobs": logprobs, "tail": tail}


def token_weights(segments: jax.Array, counted: jax.Array | None = None) -> jax.Array:
    """float32[B, T - 1]: 1 where a token's successor is of its own text (`packing.predicted`) and `counted`, else 0."""
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != PADDING)
    return (same if counted is None else same & counted[:, 1:]).astype(jnp.float32)


def flat_rows(array: jax.Array) -> jax.Array:
    """[B, T, ...] as [B * T, ...]."""
    return array.reshape(-1, *array.shape[2:])


def cast(params: Params, dtype: str) -> Any:
    """Float parameters in another dtype; gradients come back in their own."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)
