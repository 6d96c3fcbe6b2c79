"""Field case 16: padding to step sizes changes nothing, and an end id inside a prompt is a token like any other."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from jaxinfer import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
EOS = 257
# Around every step size: 8, 16 and 32, and 64 and 128 in chunks.
LENGTHS = [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    made = [[rng.randrange(256) for _ in range(length)] for length in LENGTHS]
    for prompt in made[1:]:
        prompt[len(prompt) // 2] = EOS
    return made


def outputs(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def alone(text_config: Any, text_params: Any, small: dict[str, Any], prompts: list[list[int]]) -> list[list[int]]:
    """Each by itself, in an engine with other step sizes."""
    options = {**small, "max_num_seqs": 1, "max_num_batched_tokens": 130, "max_model_len": 140}
    llm = LLM(model_config=text_config, params=text_params, **options)
    return [outputs(llm, [prompt])[0] for prompt in prompts]


def test_alone_at_every_length(llm: LLM, prompts: list[list[int]], alone: list[list[int]]) -> None:
    assert [outputs(llm, [prompt])[0] for prompt in prompts] == alone


@pytest.mark.parametrize("arrange", [list, lambda items: items[::-1], lambda items: items[1::2] + items[::2]])
def test_together_in_any_order(
    llm: LLM, prompts: list[list[int]], alone: list[list[int]], arrange: Callable[[list], list]
) -> None:
    assert outputs(llm, arrange(prompts)) == arrange(alone)
