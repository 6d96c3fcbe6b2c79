"""These tests need several devices, which JAX makes of the CPU when it starts: `test_several_devices.py` runs them."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxinfer.models.config import ModelConfig

collect_ignore_glob = [] if os.environ.get("JAX_NUM_CPU_DEVICES") else ["test_*.py"]

SMALL = {
    "enforce_eager": True,
    "compilation_cache_dir": False,
    "use_tqdm_on_load": False,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,  # one step size for all that these tests do
    "max_model_len": 48,
    "num_gpu_blocks_override": 24,
}
PROMPTS = ([7, 3, 90, 41, 5, 6, 77, 12, 60, 23], [100, 2, 64])
Answers = list[tuple[list[int], list[list[float]]]]


@pytest.fixture(scope="session")
def small() -> dict[str, Any]:
    """Arguments of an engine that compiles little."""
    return dict(SMALL)


@pytest.fixture(scope="session")
def small_model() -> Callable[..., ModelConfig]:
    """`small_model(**fields)`: one layer, 8 query heads on 2 KV heads, of odd sizes."""

    def make(**fields: Any) -> ModelConfig:
        sizes = {"vocab_size": 131, "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
        return ModelConfig(**sizes | heads | fields)

    return make


@pytest.fixture(scope="session")
def random_tree() -> Callable[..., Any]:
    """`random_tree(config)`: float32 parameters of any family, biases and norms included, all away from 0."""

    def make(config: ModelConfig, seed: int = 0) -> Any:
        import jax

        from jaxinfer.models.decoder import param_shapes

        rng = np.random.default_rng(seed)
        return jax.tree.map(
            lambda leaf: (0.3 * rng.standard_normal(leaf.shape) + (leaf.ndim == 1)).astype(np.float32),
            param_shapes(config),
        )

    return make


@pytest.fixture(scope="session")
def answers() -> Callable[..., Answers]:
    """`answers(llm)`: ids and log-probabilities of 32 greedy tokens after each of two prompts."""

    def ask(llm: Any, **options: Any) -> Answers:
        from jaxinfer import SamplingParams

        params = SamplingParams(**{"temperature": 0, "max_tokens": 32, "logprobs": 2, "ignore_eos": True} | options)
        outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in PROMPTS], params, use_tqdm=False)
        return [
            (
                list(output.outputs[0].token_ids),
                [[entry.logprob for entry in place.values()] for place in output.outputs[0].logprobs or []],
            )
            for output in outputs
        ]

    return ask


@pytest.fixture(scope="session")
def served(answers: Callable[..., Answers]) -> Callable[..., Answers]:
    """`served(config, params, answer={}, **arguments)`: `answers` of an engine with these arguments."""

    def serve(config: ModelConfig, params: Any, answer: dict[str, Any] | None = None, **arguments: Any) -> Answers:
        from jaxinfer import LLM

        with LLM(model_config=config, params=params, **SMALL | arguments) as llm:
            return answers(llm, **answer or {})

    return serve


@pytest.fixture(scope="session")
def same() -> Callable[..., None]:
    """`same(found, expected)`: the same ids, and log-probabilities within 1e-3."""

    def check(found: Answers, expected: Answers, tolerance: float = 1e-3) -> None:
        for (ids, logprobs), (wanted_ids, wanted) in zip(found, expected, strict=True):
            assert ids == wanted_ids
            np.testing.assert_allclose(np.array(logprobs), np.array(wanted), atol=tolerance, rtol=0)

    return check
