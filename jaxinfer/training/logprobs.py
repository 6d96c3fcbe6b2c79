"""Log-probabilities of given tokens, as a pure, differentiable function of the parameters."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.sequence import SequenceDecoder
from jaxinfer.training.chunks import CHUNK_TOKENS, over_tokens
from jaxinfer.training.tiled_logprobs import tiled_logprobs
from jaxinfer.typing import Params


def token_logprobs(
    params: Params,
    ids: jax.Array,
    config: ModelConfig,
    *,
    segments: jax.Array | None = None,
    temperature: float = 1.0,
    chunk: int = CHUNK_TOKENS,
    remat: bool = False,
    implementation: str | None = None,
    deterministic: bool = False,
) -> jax.Array:
    """Natural log-probability of every token but the first of its row, given those before it.

    Those of the engine's `prompt_logprobs`, by the same modules without a cache. The logits of `chunk` tokens are held
    at a time, in the backward pass as well. It may be jitted (`config` and the options are static) and differentiated.

    With `deterministic` they are, bit for bit, those of an engine made with ``deterministic=True`` from the same
    parameters, whatever was in its batches: tokens are computed in the engine's own fixed tiles
    (`jaxinfer.runner.fixed_tiles`), over a cache of keys and values that is as large as `ids`. The gradients are those
    without it, of the same function in another order of additions, for which the ordinary pass is computed as well: a
    training step takes about the time of one more forward pass.

    Args:
        params: tree of `jaxinfer.models.decoder.init_params`; quantised ones too, which get no gradients.
        ids: int32[B, T], checked, T at least 2.
        config: the architecture.
        segments: int32[B, T] where several texts share a row, see `SequenceDecoder`; a segment's first token has 0.0.
        temperature: > 0; the logits are divided by it.
        chunk: tokens whose logits are held at a time, at least 1.
        remat: compute the layers again for the gradients, instead of keeping what is inside them.
        implementation: of the attention, as for `flash_attention`; with `deterministic` of its gradients.
        deterministic: see above; not with `segments`.

    Returns:
        float32[B, T - 1]: entry t is the log-probability of ``ids[:, t + 1]``.

    Raises:
        ValueError: `temperature` or `chunk` is out of range, a row has a single token, or `deterministic` with
            `segments`.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0")
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1")
    if ids.shape[1] < 2:
        raise ValueError(f"ids has rows of {ids.shape[1]} token; it takes 2 to predict one from another")
    if deterministic:
        if segments is not None:
            raise ValueError("deterministic=True knows no segments: give each text a row of its own, padded at the end")
        ordinary = partial(
            token_logprobs, temperature=temperature, chunk=chunk, remat=remat, implementation=implementation
        )
        return with_gradients_of(partial(tiled_logprobs, temperature=temperature), ordinary, config)(params, ids)
    decoder = SequenceDecoder(config, implementation)
    x = hidden_states(decoder, params, ids, segments, remat=remat)[:, :-1]
    head = head_params(params)

    def of_tokens(tokens: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, targets = tokens
        logits = decoder.head(head, rows) / temperature
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    found: jax.Array = over_tokens(of_tokens, (x.reshape(-1, x.shape[-1]), ids[:, 1:].reshape(-1)), chunk)
    found = found.reshape(x.shape[:2])
    return found if segments is None else jnp.where(segments[:, 1:] == segments[:, :-1], found, 0.0)


def with_gradients_of(
    function: Callable[..., jax.Array], other: Callable[..., jax.Array], config: ModelConfig
) -> Callable[[Params, jax.Array], jax.Array]:
    """``function(params, ids, config=config)``, whose derivatives by `params` are those of `other`, which gives the
    same up to rounding."""

    @jax.custom_jvp
    def scored(params: Params, ids: jax.Array) -> jax.Array:
        return function(params, ids, config=config)

    @scored.defjvp
    def _(primals: tuple[Params, jax.Array], tangents: tuple[Params, Any]) -> tuple[jax.Array, jax.Array]:
        params, ids = primals
        _, slope = jax.jvp(lambda params: other(params, ids, config), (params,), (tangents[0],))
        return scored(params, ids), slope

    return scored


def hidden_states(
    decoder: SequenceDecoder, params: Params, ids: jax.Array, segments: jax.Array | None, *, remat: bool = False
) -> jax.Array:
    """`SequenceDecoder.hidden`, ``[B, T, D]``; with `remat` a layer's insides are computed again for the gradients."""
    if not remat:
        return decoder.hidden(params, ids, segments)
    x = decoder.embed(params, ids, segments)
    for index in range(decoder.config.num_hidden_layers):
        layer = jax.checkpoint(decoder.layer, static_argnums=(0,))
        x = layer(index, params[f"layers_{index}"], x, segments)
    return x


def head_params(params: Params) -> dict[str, Any]:
    """What `SequenceDecoder.head` reads."""
    return {name: value for name, value in params.items() if not name.startswith("layers_")}
