"""deterministic=True: a request's tokens and log-probabilities are the same bits whatever runs beside it."""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.models.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
SIZES = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "num_gpu_blocks_override": 26,
    "block_size": 2,
    "max_model_len": 64,
    "enforce_eager": True,
    "use_tqdm_on_load": False,
}


def engine(params: Any, deterministic: bool = True, **options: Any) -> LLM:
    return LLM(model_config=CONFIG, params=params, deterministic=deterministic, **{**SIZES, **options})


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts that share beginnings, of one token and of several chunks; all their randomness is their own."""
    rng = np.random.default_rng(5)
    shared = rng.integers(0, 64, 40).tolist()
    prompts = [shared[:1], shared[:9], shared[:30], shared[:40], rng.integers(0, 64, 13).tolist(), [63]]
    common: Any = {"ignore_eos": True, "logprobs": 2}
    params = [
        SamplingParams(temperature=0, max_tokens=14, **common),
        SamplingParams(seed=1, max_tokens=5, **common),
        SamplingParams(seed=2, max_tokens=3, top_p=0.9, top_k=20, **common),
        SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1, **common),
        SamplingParams(seed=4, max_tokens=7, frequency_penalty=0.6, **common),
        SamplingParams(temperature=0.7, seed=5, n=2, max_tokens=12, **common),
    ]
    return list(zip(prompts, params, strict=True))


def bits(output: Any) -> list[Any]:
    """Tokens and log-probabilities, exactly."""
    positions = [entry for entry in output.prompt_logprobs or [] if entry is not None]
    positions += [entry for one in output.outputs for entry in one.logprobs]
    numbers = [(token, found.logprob.hex(), found.rank) for entry in positions for token, found in entry.items()]
    return [[one.token_ids for one in output.outputs], numbers]


def count_differences(llm: LLM, num_mixes: int) -> int:
    """Runs random mixes of the requests, each in one call, and compares with each one alone, computed first."""
    draw = random.Random(0)
    chosen = requests()
    alone = [bits(llm.generate(prompt, params, use_tqdm=False)[0]) for prompt, params in chosen]
    differences = 0
    for _ in range(num_mixes):
        places = [draw.randrange(len(chosen)) for _ in range(draw.randint(1, 6))]
        outputs = llm.generate(
            [chosen[place][0] for place in places], [chosen[place][1] for place in places], use_tqdm=False
        )
        differences += sum(bits(output) != alone[place] for place, output in zip(places, outputs, strict=True))
        if draw.random() < 0.2:
            llm.reset_prefix_cache()
    return differences


@pytest.fixture(scope="module")
def weights(random_params: Callable[..., Any]) -> Any:
    return random_params(CONFIG)


@pytest.mark.parametrize(("dtype", "num_mixes"), [("float32", 200), ("bfloat16", 60)])
def test_no_mix_changes_a_bit(weights: Any, dtype: str, num_mixes: int) -> None:
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), weights)
    with engine(params) as llm:
        assert count_differences(llm, num_mixes) == 0
        stats = llm.stats()
        assert stats.num_preemptions > 10 and stats.num_prefix_hits > 500  # what it withstood
        assert stats.num_compiled <= 7


def test_other_sizes_of_engine_give_the_same_bits(weights: Any) -> None:
    results = []
    for options in ({}, {"max_num_seqs": 40, "max_num_batched_tokens": 70, "block_size": 16, "max_model_len": 128}):
        with engine(weights, **options) as llm:
            prompts, params = zip(*requests(), strict=True)
            results.append([bits(output) for output in llm.generate(prompts, params, use_tqdm=False)])
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "leave out speculative_config"),
        ({"block_size": 24}, "block_size=24 with deterministic=True must divide 64"),
        ({"deterministic": 1}, "deterministic=1 must be True or False"),
    ],
)
def test_what_is_refused(weights: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        engine(weights, **options)
