"""What heads and students are compared by: a frozen model's hidden states, and its output head, whole or for some
tokens of the vocabulary only."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.sequence import SequenceDecoder
from jaxinfer.training.logprobs import head_params
from jaxinfer.training.packing import PADDING, PackedRows
from jaxinfer.typing import Params

CUT, PLACES, CUT_HEAD = "cut", "places", "cut_head"
CUT_NAMES = {CUT, PLACES, CUT_HEAD}
"""What `cut_output` adds to parameters."""


def model_features(config: ModelConfig, params: Params, ids: jax.Array, segments: jax.Array) -> jax.Array:
    """Hidden states after the last norm, ``[B, T, D]``, which no gradients go through."""
    x = SequenceDecoder(config).hidden(params, ids, segments)
    flat = x.reshape(-1, x.shape[-1])
    normed: Any = Decoder(config).apply({"params": head_params(params)}, flat, method=Decoder.normed)
    return jax.lax.stop_gradient(normed.reshape(x.shape))


def given_features(config: ModelConfig, frozen: Params, batch: Any, dtype: str) -> jax.Array:
    """`model_features` of a batch: those that it brings ("features"), or computed now; in `dtype`."""
    if "features" in batch:
        found: jax.Array = batch["features"].astype(dtype)
        return found
    return model_features(config, frozen, batch["ids"], batch["segments"]).astype(dtype)


def model_logits(config: ModelConfig, params: Params, features: jax.Array) -> jax.Array:
    """Logits of ``features[R, D]``: float32[R, V], or float32[R, N] where `params` are those of `cut_output`."""
    if CUT in params:
        config, params = replace(config, vocab_size=params[CUT].shape[0]), params[CUT_HEAD]
    logits: Any = Decoder(config).apply({"params": head_params(params)}, features, method=Decoder.logits)
    return logits


def head_logits(config: ModelConfig, params: Params, x: jax.Array) -> jax.Array:
    """The same of ``x[R, D]``, what comes out of the last layer, before the last norm."""
    if CUT in params:
        config, params = replace(config, vocab_size=params[CUT].shape[0]), params[CUT_HEAD]
    return SequenceDecoder(config).head(head_params(params), x)


def token_places(params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where tokens stand in the logits of `model_logits`: int32, 0 where they do not; and whether they do, bool."""
    if CUT not in params:
        return tokens, jnp.ones(tokens.shape, bool)
    places = params[PLACES][tokens]
    return jnp.maximum(places, 0), places >= 0


def frequent_tokens(rows: PackedRows, count: int, vocab_size: int) -> np.ndarray:
    """int32[count], ascending: the tokens that are most frequent in the data, and then those with the lowest ids,
    which stand for the most frequent pieces of text where a tokenizer's merges were learned in this order.
    """
    counts = np.bincount(rows.ids[rows.segments != PADDING], minlength=vocab_size)
    order = np.argsort(-counts, kind="stable")
    return np.sort(order[:count]).astype(np.int32)


def check_loss_vocab(loss_vocab: int, vocab_size: int) -> None:
    """Raises ValueError where the loss is to compare more tokens than there are; 0 means all."""
    if not 0 <= loss_vocab <= vocab_size:
        raise ValueError(f"loss_vocab={loss_vocab} must be 0, for all, or 1 to the model's {vocab_size} tokens")


def cut_output(config: ModelConfig, params: Params, tokens: Any) -> Params:
    """What `model_logits` needs for the logits of these tokens alone: "cut", the tokens; "cut_head"; and "places",
    int32[V], each token's place in them or -1.

    Args:
        config: of the model.
        params: its parameters; at least those of its head.
        tokens: int32[N], ascending.
    """
    tokens = jnp.asarray(tokens)
    name, leaf = ("embed", "embedding") if config.tie_word_embeddings else ("lm_head", "kernel")
    head = {"final_norm": params["final_norm"], name: {**params[name], leaf: params[name][leaf][tokens]}}
    places = jnp.full(config.vocab_size, -1, jnp.int32).at[tokens].set(jnp.arange(len(tokens), dtype=jnp.int32))
    return {CUT: tokens, CUT_HEAD: head, PLACES: places}
