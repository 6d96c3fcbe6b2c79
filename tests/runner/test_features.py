"""The pool's features: what the model computed for a token lies in the token's slot, however it came there."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig, SpeculationConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.sequence import SequenceDecoder
from jaxinfer.runner.programs import Programs
from jaxinfer.runner.runner import ModelRunner

MODEL = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128,
)  # fmt: skip
CONFIG = EngineConfig(
    MODEL,
    CacheConfig(block_size=4, num_blocks=40),
    SchedulerConfig(4, 16, 64, token_buckets=(16,)),
    RunnerConfig(enforce_eager=True),
    speculation=SpeculationConfig(3, features="hidden"),
)
SEEDED = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def params(random_params: Callable[..., Any]) -> Any:
    return random_params(MODEL, seed=5)


@pytest.fixture(scope="module")
def runner(params: Any) -> ModelRunner:
    return ModelRunner(CONFIG, params)


def expected(params: Any, ids: list[int]) -> np.ndarray:
    """float32[L, D]: hidden states after the last norm, by the decoder over whole sequences."""
    params = jax.tree.map(jnp.asarray, params)
    padded = np.zeros((1, 64), np.int32)  # what follows a token does not matter to it
    padded[0, : len(ids)] = ids
    hidden = SequenceDecoder(MODEL).hidden(params, jnp.asarray(padded))[0]
    return np.asarray(Decoder(MODEL).apply({"params": params}, hidden, method=Decoder.normed))[: len(ids)]


def held(engine: Engine) -> dict[str, tuple[list[int], np.ndarray]]:
    """Of each running request the tokens that are certainly computed, and their features."""
    found, features = {}, np.asarray(engine.runner.kv.features)
    for name, request in engine.scheduler._requests.items():
        count = request.num_known_tokens - 1
        places = np.arange(count)
        blocks = np.array(request.block_ids)[places // 4]
        found[name] = request.token_ids(0, count), features[blocks, 0, places % 4]
    return found


def test_chunks_prefixes_forks_and_preemptions(runner: ModelRunner, params: Any) -> None:
    """A prompt longer than a step, one that finds its beginning in the prefix cache, samples that share a block until
    they write to it, and a request that has lost its blocks."""
    engine = Engine(CONFIG, runner, None)
    prompt = np.random.default_rng(0).integers(2, 60, 22).tolist()
    engine.add_request("first", prompt, SEEDED)
    for _ in range(5):
        engine.step()
    engine.add_request("second", [*prompt[:18], 3, 4], SEEDED)
    engine.add_request("samples", prompt[:10], dataclasses.replace(SEEDED, n=2))
    for _ in range(6):
        engine.step()
    assert engine.stats().num_prefix_hits >= 16 and engine.scheduler.num_running == 4
    engine.scheduler.check_integrity()
    before = held(engine)
    assert set(before) == {"first", "second", "samples/0", "samples/1"}
    while engine._steps:
        engine._complete_step()
    engine.scheduler.preempt_all()
    for _ in range(10):
        engine.step()
    after = held(engine)
    assert any(len(after[name][0]) > len(before[name][0]) for name in after)
    for ids, features in [*before.values(), *after.values()]:
        np.testing.assert_allclose(features, expected(params, ids), atol=2e-4, rtol=2e-3)


def test_released_and_restored_with_the_pool(runner: ModelRunner) -> None:
    old = runner.kv.features
    runner.release_kv()
    assert old is not None and old.is_deleted()
    runner.restore_kv()
    assert runner.kv.features.shape == (40, 1, 4, 32) and not np.asarray(runner.kv.features).any()


def test_who_asks_for_none_pays_nothing(params: Any) -> None:
    """The program of a step and of the copies is the same text as without speculation."""
    plain = dataclasses.replace(CONFIG, speculation=None)
    asks = dataclasses.replace(CONFIG, speculation=SpeculationConfig(3))
    texts = []
    for config in (plain, asks, CONFIG):
        one = ModelRunner(config, params)
        programs = Programs(config, params, one.kv, one._state)
        texts.append(programs.lower(programs.spec(16, False)).as_text())
    assert texts[0] == texts[1] != texts[2]
