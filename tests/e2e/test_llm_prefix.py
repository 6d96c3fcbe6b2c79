"""Prefix caching through the front doors: new weights, salts, resets, several samples with seeds."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxinfer import LLM, AsyncLLM, RequestOutput, SamplingParams
from jaxinfer.models.config import ModelConfig

# With log-probabilities, so that all steps that draw run the same two programs; all engines have the same shapes.
GREEDY = SamplingParams(temperature=0, max_tokens=20, logprobs=1)
SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "num_gpu_blocks_override": 60, "enforce_eager": True}
PROMPT = [(29 * i + 3) % 256 for i in range(48)]


@pytest.fixture(scope="module")
def llm(tiny_config: ModelConfig, tiny_params: Callable[[int], Any]) -> Iterator[LLM]:
    with small_llm(tiny_config, tiny_params(1)) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(tiny_config: ModelConfig, tiny_params: Callable[[int], Any]) -> Iterator[LLM]:
    """With the second parameters, and no cache."""
    with small_llm(tiny_config, tiny_params(2), enable_prefix_caching=False) as engine:
        yield engine


def small_llm(config: ModelConfig, params: Any, **options: Any) -> LLM:
    return LLM(model_config=config, params=params, use_tqdm_on_load=False, **SIZES, **options)


def generate(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> RequestOutput:
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output


def check_same(output: RequestOutput, expected: RequestOutput) -> None:
    for sample, other in zip(output.outputs, expected.outputs, strict=True):
        assert sample.token_ids == other.token_ids
        assert sample.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)


def test_new_weights_are_not_mixed_with_old_keys_and_values(
    llm: LLM, plain: LLM, tiny_params: Callable[[int], Any]
) -> None:
    """Field case 14."""
    expected = generate(plain, PROMPT)
    before = generate(llm, PROMPT)
    assert before.outputs[0].token_ids != expected.outputs[0].token_ids
    again = generate(llm, PROMPT)
    assert again.num_cached_tokens == 32, "of 48 tokens two full blocks, and one that is computed to draw from"
    check_same(again, before)
    llm.update_params(tiny_params(2))
    first, second = generate(llm, PROMPT), generate(llm, PROMPT)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    check_same(first, expected)
    check_same(second, expected)
    llm.update_params(tiny_params(1))
    check_same(generate(llm, PROMPT), before)


def test_weights_change_while_a_request_runs(llm: LLM, plain: LLM, tiny_params: Callable[[int], Any]) -> None:
    """Field case 14: nobody finds what it goes on to compute."""
    parts = llm._parts
    parts.update_params(tiny_params(1))
    parts.engine.add_request("running", PROMPT, SamplingParams(temperature=0, max_tokens=40, logprobs=0))
    for _ in range(9):
        parts.engine.step()
    assert not llm.reset_prefix_cache(), "a request runs"
    parts.update_params(tiny_params(2))
    while parts.engine.has_unfinished_requests():
        outputs = parts.engine.step()
    answer = outputs[0].outputs[0].token_ids
    longer = generate(llm, [*PROMPT, *answer])
    assert longer.num_cached_tokens == 0
    check_same(longer, generate(plain, [*PROMPT, *answer]))


def test_a_reset_empties_the_cache(llm: LLM) -> None:
    generate(llm, PROMPT)
    assert generate(llm, PROMPT).num_cached_tokens == 32
    assert llm.reset_prefix_cache() is True
    assert generate(llm, PROMPT).num_cached_tokens == 0


def test_salts_come_with_prompts(llm: LLM) -> None:
    llm.reset_prefix_cache()
    salted = [{"prompt_token_ids": PROMPT, "cache_salt": salt} for salt in ("a", "b", "a", None)]
    assert [generate(llm, prompt).num_cached_tokens for prompt in salted] == [0, 0, 32, 0]
    with pytest.raises(ValueError, match="cache_salt=''"):
        generate(llm, {"prompt_token_ids": PROMPT, "cache_salt": ""})


def test_scored_prompts_are_right_with_a_full_cache(llm: LLM) -> None:
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    cold, warm = generate(llm, PROMPT, params), generate(llm, PROMPT, params)
    assert warm.num_cached_tokens == 0 and len(warm.prompt_logprobs) == len(PROMPT)
    assert [list(entry or ()) for entry in warm.prompt_logprobs] == [list(e or ()) for e in cold.prompt_logprobs]


def test_samples_with_a_seed_do_not_depend_on_what_is_shared(
    llm: LLM, plain: LLM, tiny_params: Callable[[int], Any]
) -> None:
    """Field case 2, with several samples: cold, warm, beside others, without a cache; and fewer slots than samples."""
    params = SamplingParams(n=10, temperature=0.8, seed=42, max_tokens=12, logprobs=0)
    llm.update_params(tiny_params(2))
    cold = generate(llm, PROMPT[:37], params)
    assert len({tuple(sample.token_ids) for sample in cold.outputs}) > 1
    check_same(generate(llm, PROMPT[:37], params), cold)
    others = [PROMPT[:37], PROMPT[:20], [9, 9]]
    beside = llm.generate(others, [params, GREEDY, SamplingParams(n=3, max_tokens=9, logprobs=0)], use_tqdm=False)
    check_same(beside[0], cold)
    check_same(generate(plain, PROMPT[:37], params), cold)


def test_async_requests_share_and_can_be_reset(tiny_config: ModelConfig, tiny_params: Callable[[int], Any]) -> None:
    async def main() -> None:
        async with AsyncLLM(model_config=tiny_config, params=tiny_params(1), use_tqdm_on_load=False, **SIZES) as llm:
            found = [(await llm.generate(PROMPT, GREEDY)).num_cached_tokens for _ in range(2)]
            assert await llm.reset_prefix_cache()
            found.append(
                (await llm.generate({"prompt_token_ids": PROMPT, "cache_salt": "s"}, GREEDY)).num_cached_tokens
            )
            found.append((await llm.generate(PROMPT, GREEDY)).num_cached_tokens)
            assert found == [0, 32, 0, 0]
            await llm.update_params(tiny_params(2))
            assert (await llm.generate(PROMPT, GREEDY)).num_cached_tokens == 0

    asyncio.run(main())
