"""Field case 17: after warm-up nothing is compiled, whatever is asked for."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from jax import monitoring

from jaxinfer import LLM, SamplingParams

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiles() -> Iterator[list[str]]:
    """Every compilation JAX does while the test runs, ours or not."""
    events: list[str] = []

    def note(name: str, seconds: float, **_: object) -> None:
        if name == COMPILE_EVENT:
            events.append(name)

    monitoring.register_event_duration_secs_listener(note)
    yield events
    monitoring.unregister_event_duration_listener(note)


def random_requests(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        options: dict[str, Any] = {"temperature": rng.choice([0.0, rng.uniform(0.05, 1.3)])}
        choices: list[dict[str, Any]] = [
            {"top_k": rng.randint(1, 50)},
            {"top_p": rng.uniform(0.1, 1.0)},
            {"min_p": rng.uniform(0.0, 0.5)},
            {"repetition_penalty": rng.uniform(0.8, 1.5), "presence_penalty": rng.uniform(-1, 1)},
            {"seed": rng.randint(0, 99)},
            {"logprobs": rng.choice([0, 3, -1])},
            {"prompt_logprobs": rng.choice([0, 2])},
            {"logit_bias": {rng.randrange(256): rng.uniform(-5, 5)}},
            {"allowed_token_ids": list(range(40, 100))},
            {"bad_words": ["ab", "c"]},
            {"min_tokens": 3},
            {"stop": ["q"]},
        ]
        for choice in choices:
            if rng.random() < 0.3:
                options |= choice
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 200))]
        requests.append((prompt, SamplingParams(max_tokens=rng.randint(3, 12), **options)))
    return requests


def test_nothing_is_compiled_after_warm_up(
    text_config: Any, text_params: Any, tokenizer_dir: Any, small: dict[str, Any], compiles: list[str]
) -> None:
    options = {**small, "enforce_eager": False, "num_gpu_blocks_override": 30}
    llm = LLM(model_config=text_config, params=text_params, tokenizer=tokenizer_dir, **options)
    documented = llm.stats().num_compiled
    compiles.clear()
    requests = random_requests(0, 60)
    rng = random.Random(1)
    while requests:
        batch = [requests.pop() for _ in range(min(len(requests), rng.randint(1, 8)))]
        llm.generate([prompt for prompt, _ in batch], [params for _, params in batch], use_tqdm=False)
    llm.generate([[5] * 60] * 4, SamplingParams(max_tokens=150, ignore_eos=True), use_tqdm=False)
    hits = llm.stats().num_prefix_hits
    # A prefix hit; and two samples that copy the block the first has filled in part.
    (output,) = llm.generate([[5] * 60], SamplingParams(n=3, max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert output.num_cached_tokens == 48 and llm.stats().num_prefix_hits == hits + 48
    assert llm.stats().num_preemptions > 0
    assert llm.stats().num_compiled == documented
    assert compiles == []


def test_a_compilation_would_be_noticed(compiles: list[str]) -> None:
    import jax

    jax.jit(lambda x: x * 3 + 17)(jax.numpy.arange(11))
    assert compiles
