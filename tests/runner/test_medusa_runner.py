"""What the Medusa heads of an engine guess, against NumPy."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig, SpeculationConfig
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.medusa import MedusaConfig, config_of_medusa, medusa_shapes
from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.plan import QuantPlan
from jaxinfer.runner.medusa_runner import MedusaRunner
from jaxinfer.runner.runner import ModelRunner

MODEL = ModelConfig(
    vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, logit_softcap=3.0,
    logit_multiplier=0.5,
)  # fmt: skip
CONFIG = EngineConfig(
    MODEL,
    CacheConfig(block_size=4, num_blocks=9),
    SchedulerConfig(12, 16, 64),
    RunnerConfig(enforce_eager=True),
    speculation=SpeculationConfig(5, max_running=10, features="hidden"),
)
PLACES = ([3, 1, 8], [0, 3, 2])


def random_heads(heads: MedusaConfig, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    shapes = medusa_shapes(heads, jnp.float32)
    return jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)


def expected(heads: MedusaConfig, params: Any, hidden: np.ndarray, output: Callable[[Any], Any]) -> np.ndarray:
    """float64[B, K, V], log-probabilities of every head."""
    found = []
    for index in range(heads.num_heads):
        head, x = params[f"heads_{index}"], hidden.astype(np.float64)
        for layer in range(heads.num_layers):
            block = head[f"blocks_{layer}"]
            y = x @ block["kernel"].T + block["bias"]
            x = x + y / (1 + np.exp(-y))
        logits = x @ head["lm_head"]["kernel"].T if heads.own_heads else output(x)
        found.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    return np.stack(found, axis=1)


def softcapped(matrix: np.ndarray) -> Callable[[Any], Any]:
    return lambda x: 3.0 * np.tanh(0.5 * (x @ matrix.T) / 3.0)


@pytest.mark.parametrize("own", [False, True])
def test_the_best_guesses_of_each_head(random_params: Callable[..., Any], own: bool) -> None:
    params = random_params(MODEL, seed=1)
    heads = MedusaConfig(32, 40, 3, 2, own)
    given = random_heads(heads)
    assert config_of_medusa(given, 40) == heads
    runner = ModelRunner(CONFIG, params)
    features = np.random.default_rng(2).normal(size=runner.kv.features.shape).astype(np.float32)
    runner.kv = runner.kv._replace(features=jnp.asarray(features))
    medusa = MedusaRunner(runner, heads, given, 6)
    ids, logprobs = medusa.candidates(*PLACES)
    assert ids.shape == logprobs.shape == (3, 3, 6) and ids.dtype == np.int32 and logprobs.dtype == np.float32
    hidden = features[PLACES[0], 0, PLACES[1]]
    right = expected(heads, given, hidden, softcapped(params["lm_head"]["kernel"]))
    np.testing.assert_array_equal(ids, np.argsort(-right, axis=-1)[..., :6])
    np.testing.assert_allclose(logprobs, np.take_along_axis(right, ids, axis=-1), atol=1e-5)
    # Batches of 1, of up to 8 and of the most that may run; other weights need no other programs.
    medusa.warm_up()
    assert medusa.num_compiled == 3
    assert (medusa.candidates([8], [2])[0] == ids[2:]).all()
    other = random_heads(heads, 1)
    medusa.take_params()
    medusa.update_params(other)
    ids, _ = medusa.candidates(*PLACES)
    right = expected(heads, other, hidden, softcapped(params["lm_head"]["kernel"]))
    np.testing.assert_array_equal(ids, np.argsort(-right, axis=-1)[..., :6])
    assert medusa.num_compiled == 3


def test_a_quantised_token_table_is_the_output_head(random_params: Callable[..., Any]) -> None:
    model = replace(MODEL, tie_word_embeddings=True, logit_softcap=None, logit_multiplier=1.0)
    params, plan = random_params(model, seed=1), QuantPlan("int8", embedding=True)
    table = plan.apply("embed/embedding", params["embed"]["embedding"], "float32")
    assert isinstance(table, QuantArray)
    heads = MedusaConfig(32, 40, 2)
    runner = ModelRunner(replace(CONFIG, model=model), params | {"embed": {"embedding": table}})
    runner.kv = runner.kv._replace(features=jnp.ones_like(runner.kv.features))
    given = random_heads(heads)
    ids, logprobs = MedusaRunner(runner, heads, given, 3).candidates([1], [1])
    rounded = np.asarray(table.codes, np.float64) * np.asarray(table.scale)
    right = expected(heads, given, np.ones((1, 32)), lambda x: x @ rounded.T)
    np.testing.assert_array_equal(ids, np.argsort(-right, axis=-1)[..., :3])
    # The CPU's product with int8 codes takes activations of about 15 bits.
    np.testing.assert_allclose(logprobs, np.take_along_axis(right, ids, axis=-1), atol=5e-4)


def test_a_pool_without_features_is_refused(random_params: Callable[..., Any]) -> None:
    config = replace(CONFIG, speculation=SpeculationConfig(5))
    with pytest.raises(ValueError, match="features=None"):
        MedusaRunner(ModelRunner(config, random_params(MODEL)), MedusaConfig(32, 40, 1), {}, 3)
