"""The decode step with its layers scanned over stacked weights: what jaxinfer does not do, kept for comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.cache.paged import LayerCache
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLayer
from jaxinfer.models.norm import Norm
from jaxinfer.models.rope import rotation
from jaxinfer.runner.inputs import StepSpec, unpack
from jaxinfer.runner.step import make_attention


def stacked_shapes(params: Any, num_layers: int) -> Any:
    """Shapes of a decoder's parameters with the layers' stacked: ``{"layers": [L, ...], the others as they were}``."""
    layer = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((num_layers, *leaf.shape), leaf.dtype), dict(params["layers_0"])
    )
    return {name: value for name, value in params.items() if not name.startswith("layers_")} | {"layers": layer}


def make_scanned_step(config: ModelConfig, spec: StepSpec, num_pages: int, block_size: int) -> Callable[..., Any]:
    """``(params, pages, last_tokens, packed) -> (pages, last_tokens)``, greedy.

    The pools of all layers are one pool, ``[L * P, 2K, S, H]``, in which a layer's pages come after those of the layers
    below it: so nothing is sliced out of it and put back.
    """

    def step(params: Any, pages: jax.Array, last_tokens: jax.Array, packed: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs = unpack(packed, spec)
        attention = make_attention(inputs, spec, config, block_size)
        angles = rotation(config, inputs.positions)

        def body(carry: tuple[jax.Array, jax.Array], layer: tuple[Any, jax.Array]) -> tuple[Any, None]:
            x, pool = carry
            weights, first_page = layer
            shifted = replace(
                attention,
                page_ids=attention.page_ids + first_page,
                block_tables=attention.block_tables + first_page,
            )
            apply: Any = DecoderLayer(config, config.layer_kind(0)).apply
            x, cache = apply({"params": weights}, x, angles, shifted, LayerCache(pool))
            return (x, cache.pages), None

        x = params["embed"]["embedding"][last_tokens]
        first_pages = num_pages * jnp.arange(config.num_hidden_layers, dtype=jnp.int32)
        (x, pages), _ = jax.lax.scan(body, (x, pages), (params["layers"], first_pages))
        normed: Any = Norm(config, (config.hidden_size,)).apply({"params": params["final_norm"]}, x)
        head = params["lm_head"]["kernel"]
        logits = jax.lax.dot_general(normed, head, (((1,), (1,)), ((), ()))).astype(jnp.float32)
        return pages, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return step
