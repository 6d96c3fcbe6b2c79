"""An engine that gives device memory back and takes it again goes on as if nothing had happened."""

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxinfer import LLM, AsyncLLM, EngineAsleepError, SamplingParams

TINY_LLAMA = Path(__file__).parents[1] / "data" / "tiny_llama"
PROMPTS = [{"prompt_token_ids": [5, 9, 17, 33, 60, 2, 40]}, {"prompt_token_ids": [7] * 20}]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(
        n=2, seed=11, max_tokens=12, ignore_eos=True, logprobs=2, frequency_penalty=0.5, logit_bias={3: 1.0}
    ),
]


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def told(outputs: list[Any]) -> tuple[list[list[int]], list[float]]:
    samples = [one for output in outputs for one in output.outputs]
    return [one.token_ids for one in samples], [one.cumulative_logprob for one in samples]


def answers(llm: LLM) -> tuple[list[list[int]], list[float]]:
    return told(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def check_same(found: tuple[list[list[int]], list[float]], expected: tuple[list[list[int]], list[float]]) -> None:
    """What FIELD_CASES' equality rule calls the same: what the prefix cache has decides about batch shapes."""
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=1e-3)


@pytest.fixture(scope="module")
def from_disk() -> Iterator[tuple[LLM, int]]:
    """An engine from a checkpoint, and the bytes that were live before it."""
    before = live_bytes()
    with LLM(
        TINY_LLAMA,
        skip_tokenizer_init=True,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        num_gpu_blocks_override=200,
        enforce_eager=True,
        use_tqdm_on_load=False,
        enable_sleep_mode=True,
    ) as llm:
        yield llm, before


def pool_bytes(llm: LLM | AsyncLLM) -> int:
    config = llm._parts.engine.config
    model, cache = config.model, config.cache
    per_layer = cache.num_blocks * 2 * model.num_key_value_heads * cache.block_size * model.head_dim * 4
    sampler = config.scheduler.max_num_seqs * (8 * model.vocab_size + 4)
    return model.num_hidden_layers * per_layer + sampler


@pytest.mark.parametrize("level", [1, 2])
def test_all_memory_comes_back_and_results_stay(from_disk: tuple[LLM, int], level: int) -> None:
    llm, before = from_disk
    expected = answers(llm)
    awake, compiled = live_bytes(), llm.stats().num_compiled
    assert awake - before > pool_bytes(llm) > 100_000
    llm.sleep(level)
    assert llm.is_sleeping()
    assert live_bytes() - before < 1_000
    for call in (lambda: llm.generate(PROMPTS, PARAMS[0]), lambda: llm.generate([7], PARAMS[0])):
        with pytest.raises(EngineAsleepError, match="wake_up"):
            call()
    llm.sleep(1)  # asleep already: what is dropped stays dropped
    llm.wake_up()
    assert not llm.is_sleeping()
    assert live_bytes() == awake
    check_same(answers(llm), expected)
    assert llm.stats().num_compiled == compiled


def test_the_kv_cache_alone(from_disk: tuple[LLM, int]) -> None:
    llm, _ = from_disk
    expected, awake = answers(llm), live_bytes()
    llm.release_kv_cache()
    assert awake - live_bytes() == pool_bytes(llm)
    with pytest.raises(EngineAsleepError, match="restore_kv_cache"):
        answers(llm)
    llm.release_kv_cache()
    llm.restore_kv_cache()
    assert live_bytes() == awake
    check_same(answers(llm), expected)


def test_tags_bring_back_one_after_the_other(from_disk: tuple[LLM, int]) -> None:
    llm, before = from_disk
    expected, awake = answers(llm), live_bytes()
    llm.sleep(2)
    for tags in (["weigths"], "weights"):
        with pytest.raises(ValueError, match="tags="):
            llm.wake_up(tags)
    llm.wake_up(tags=["weights"])
    assert llm.is_sleeping()
    assert before < live_bytes() == awake - pool_bytes(llm)
    with pytest.raises(EngineAsleepError):
        answers(llm)
    llm.wake_up(tags=["kv_cache"])
    assert not llm.is_sleeping()
    check_same(answers(llm), expected)
    for level in (0, 3, True):
        with pytest.raises(ValueError, match="level="):
            llm.sleep(level)


def test_callers_arrays_stay_the_callers(tiny_config: Any, tiny_params: Any, small: dict[str, Any]) -> None:
    mine = jax.tree.map(jax.numpy.asarray, tiny_params(0))
    others = jax.tree.map(jax.numpy.asarray, tiny_params(1))
    with LLM(model_config=tiny_config, params=mine, **small | {"max_num_batched_tokens": 8}) as llm:
        expected, awake = answers(llm), live_bytes()
        llm.sleep(1)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(mine))
        llm.wake_up()
        assert live_bytes() == awake  # they are used again, not copied
        check_same(answers(llm), expected)
        llm.sleep(2)
        with pytest.raises(ValueError, match=r"update_params"):
            llm.wake_up()
        assert llm.is_sleeping()
        llm.update_params(others)
        llm.wake_up()
        changed = answers(llm)
    with LLM(model_config=tiny_config, params=others, **small | {"max_num_batched_tokens": 8}) as fresh:
        check_same(changed, answers(fresh))
    assert changed[0] != expected[0]


def test_a_copy_on_the_host_is_enough(tiny_config: Any, tiny_params: Any, small: dict[str, Any]) -> None:
    params = jax.tree.map(jax.numpy.asarray, tiny_params(0))
    with LLM(model_config=tiny_config, params=params, **small | {"max_num_batched_tokens": 8}) as llm:
        expected = answers(llm)
        llm.sleep(1)
        for leaf in jax.tree.leaves(params):
            leaf.delete()  # as a training step does that takes them donated
        llm.wake_up()
        check_same(answers(llm), expected)


def test_half_finished_requests_go_on(async_llm: AsyncLLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, logprobs=1)
    drawn = SamplingParams(n=2, seed=5, max_tokens=80, ignore_eos=True, logprobs=1)

    async def main() -> None:
        expected = told([await async_llm.generate("abc", long), await async_llm.generate("xyz", drawn)])
        before = live_bytes()
        started = [async_llm.generate("abc", long), async_llm.generate("xyz", drawn), async_llm.generate("q", long)]
        seen = await asyncio.gather(*[anext(stream) for stream in started])
        await async_llm.sleep(level=1)
        assert await async_llm.is_sleeping()
        assert before - live_bytes() >= pool_bytes(async_llm)  # the fixture holds the weights
        stats = async_llm.stats()
        assert (stats.num_unfinished, stats.num_running, stats.num_free_blocks) == (3, 0, stats.num_blocks)
        with pytest.raises(EngineAsleepError):
            await async_llm.generate("new", long)
        await async_llm.abort(seen[2].request_id)
        await async_llm.wake_up()
        results = [[output async for output in stream][-1] for stream in started[:2]]
        assert not any(output.finished for output in seen)
        check_same(told(results), expected)
        await async_llm.release_kv_cache()
        waiting = asyncio.create_task(_until_idle(async_llm))
        await async_llm.restore_kv_cache()
        await waiting

    asyncio.run(main())


async def _until_idle(llm: AsyncLLM) -> None:
    while await llm.is_sleeping():
        await asyncio.sleep(0.01)
