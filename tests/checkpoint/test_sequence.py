"""Whole sequences at once, without a cache: transformers' logits, whoever shares the row."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoint import load_params, open_checkpoint
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.sequence import SequenceDecoder, sequence_positions

Case = Any  # conftest's FamilyCase
CUT = 9
QUICK: Any = {"xla_backend_optimization_level": 0}  # for programs that run once or twice


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "cohere2", "qwen2_moe", "llama_yarn"])
def test_rows_and_segments_of_rows_are_sequences_of_their_own(name: str, make_case: Callable[[str], Case]) -> None:
    """Two rows: the text, and its first tokens followed by it from the beginning again."""
    case = make_case(name)
    checkpoint = open_checkpoint(case.folder())
    params, tokens = load_params(checkpoint, "float32"), case.tokens
    count = len(tokens)
    decoder = SequenceDecoder(case.served_for(checkpoint.model_config, count))
    ids = jnp.array([tokens, tokens[:CUT] + tokens[: count - CUT]], jnp.int32)
    segments = jnp.array([[0] * count, [7] * CUT + [3] * (count - CUT)], jnp.int32)
    run = jax.jit(decoder.__call__, compiler_options=QUICK)
    logits, expected = run(params, ids, segments), case.logits(count)
    for found, wanted in (
        (logits[0], expected),
        (logits[1, :CUT], expected[:CUT]),
        (logits[1, CUT:], expected[: count - CUT]),
    ):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


def test_positions_start_anew_with_each_segment() -> None:
    segments = jnp.array([[4, 4, 4, 1, 1, 4], [0, 0, 0, 0, 0, 0]])
    assert sequence_positions(2, 6, segments).tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    assert sequence_positions(1, 3).tolist() == [[0, 1, 2]]


def test_a_layer_at_a_time_needs_only_its_own_parameters(tiny_config: ModelConfig, tiny_params: Any) -> None:
    decoder, params = SequenceDecoder(tiny_config), tiny_params(0)
    ids = jnp.array([[5, 1, 7, 2, 9]], jnp.int32)
    x = decoder.embed({"embed": params["embed"]}, ids)
    for index in range(tiny_config.num_hidden_layers):
        x = decoder.layer(index, params[f"layers_{index}"], x)
    last = decoder.head({key: params[key] for key in params if not key.startswith("layers")}, x[:, -1])
    np.testing.assert_allclose(last, decoder(params, ids)[:, -1], rtol=0, atol=1e-5)


def test_the_gradient_is_the_slope_of_the_loss(tiny_config: ModelConfig, tiny_params: Any) -> None:
    config = replace(tiny_config, num_hidden_layers=1)
    decoder, params = SequenceDecoder(config), {key: tiny_params(1)[key] for key in tiny_params(1) if key != "layers_1"}
    ids = jnp.array([[5, 1, 7, 2, 9, 4], [3, 3, 8, 1, 0, 6]], jnp.int32)
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(params))))
    direction = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape) / leaf.size**0.5, params)

    @partial(jax.jit, compiler_options=QUICK)
    @jax.value_and_grad
    def loss(step: jax.Array) -> jax.Array:
        moved = jax.tree.map(lambda leaf, towards: leaf + step * towards, params, direction)
        return jnp.mean(jax.nn.logsumexp(decoder(moved, ids), axis=-1))

    step = 2e-2
    slope = (loss(step)[0] - loss(-step)[0]) / (2 * step)
    np.testing.assert_allclose(loss(0.0)[1], slope, rtol=2e-2)
