"""The trainer's log-probabilities are the engine's, bit for bit, and gradients flow through them."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes
from jaxinfer.training import token_logprobs

SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 40, "enforce_eager": True, "use_tqdm_on_load": False}
LENGTHS = (1, 3, 16, 17, 31, 33, 50, 64)
NEW = 9
BASE = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
ODD = {
    "num_key_value_heads": 1,
    "sliding_window": 20,
    "window_layers": (True, False),
    "attn_softcap": 5.0,
    "logit_softcap": 3.0,
    "tie_word_embeddings": True,
    "post_norms": True,
    "norm": "layer",
    "qkv_bias": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_layers": (False, True),
}
"""Something of every family: windows, caps, experts, biases, layer norms, one KV head, the embedding as head."""


def random_weights(config: ModelConfig, dtype: str) -> Any:
    """Weights with which every position matters to the next token."""
    rng = np.random.default_rng(1)

    def fill(shape: jax.ShapeDtypeStruct) -> jax.Array:
        mean = 1.0 if len(shape.shape) == 1 else 0.0
        return jnp.asarray(mean + 0.4 * rng.standard_normal(shape.shape), dtype)

    return jax.tree.map(fill, param_shapes(config))


def rollout(config: ModelConfig, params: Any) -> tuple[list[list[int]], list[np.ndarray], list[np.ndarray]]:
    """Sequences that an engine wrote, its log-probabilities of what it drew, float32, and those that it gives
    afterwards of all tokens at temperature 0.8."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, config.vocab_size, count).tolist() for count in LENGTHS]
    drawn = SamplingParams(seed=7, max_tokens=NEW, ignore_eos=True, logprobs=0)
    with LLM(model_config=config, params=params, deterministic=True, **SMALL) as llm:
        samples = [output.outputs[0] for output in llm.generate(prompts, drawn, use_tqdm=False)]
        sequences = [prompt + list(one.token_ids) for prompt, one in zip(prompts, samples, strict=True)]
        cooler = llm.compute_logprobs(sequences, temperature=0.8)
    logprobs = [
        np.array([entry[token].logprob for entry, token in zip(one.logprobs, one.token_ids, strict=True)], np.float32)
        for one in samples
    ]
    return sequences, logprobs, cooler


@pytest.mark.parametrize(("options", "dtype"), [({}, "float32"), ({}, "bfloat16"), (ODD, "float32")])
def test_rollouts_have_the_trainers_bits(options: dict[str, Any], dtype: str) -> None:
    config = dataclasses.replace(BASE, **options)
    params = random_weights(config, dtype)
    sequences, rollouts, cooler = rollout(config, params)
    ids = np.zeros((len(sequences), max(LENGTHS) + NEW + 2), np.int32)
    for row, tokens in enumerate(sequences):
        ids[row, : len(tokens)] = tokens
    scored = jax.jit(partial(token_logprobs, config=config, deterministic=True))(params, ids)
    plain = jax.jit(partial(token_logprobs, config=config))(params, ids)
    at_08 = jax.jit(partial(token_logprobs, config=config, deterministic=True, temperature=0.8))(params, ids)
    for row, found in enumerate(cooler):
        assert found.tobytes() == np.asarray(at_08[row, : len(found)]).tobytes()
    num_other = 0
    for row, (length, expected) in enumerate(zip(LENGTHS, rollouts, strict=True)):
        found = np.asarray(scored[row, length - 1 : length - 1 + NEW])
        assert found.tobytes() == expected.tobytes(), (length, found, expected)
        ordinary = np.asarray(plain[row, length - 1 : length - 1 + NEW])
        np.testing.assert_allclose(found, ordinary, atol=2e-4 if dtype == "float32" else 0.3)
        num_other += int((found != ordinary).sum())
    assert num_other > 0  # without the mode they differ: this test sees single bits


def test_values_keep_their_bits_under_gradients_and_temperature() -> None:
    """In a loss inside a larger program the value is the same, and its slope is the ordinary one."""
    params = random_weights(BASE, "float32")
    ids = jnp.asarray(np.random.default_rng(2).integers(0, 96, (3, 21)), jnp.int32)
    options: dict[str, Any] = {"config": BASE, "temperature": 0.8}
    alone = jax.jit(partial(token_logprobs, deterministic=True, **options))(params, ids)

    def loss(params: Any, deterministic: bool) -> tuple[jax.Array, jax.Array]:
        found = token_logprobs(params, ids, deterministic=deterministic, **options)
        return jnp.sum(jnp.exp(0.1 * found)), found

    slope, inside = jax.jit(jax.grad(partial(loss, deterministic=True), has_aux=True))(params)
    expected, ordinary = jax.jit(jax.grad(partial(loss, deterministic=False), has_aux=True))(params)
    assert np.asarray(inside).tobytes() == np.asarray(alone).tobytes()
    np.testing.assert_allclose(inside, ordinary, atol=2e-4)
    for (path, found), wanted in zip(
        jax.tree_util.tree_leaves_with_path(slope), jax.tree.leaves(expected), strict=True
    ):
        scale = float(jnp.abs(wanted).max())
        assert scale > 0
        np.testing.assert_allclose(found, wanted, atol=1e-4 * scale, err_msg=jax.tree_util.keystr(path))


def test_segments_are_refused() -> None:
    ids = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="knows no segments"):
        token_logprobs(random_weights(BASE, "float32"), ids, BASE, segments=ids, deterministic=True)
