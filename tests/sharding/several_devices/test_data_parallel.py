"""data_parallel_size: replicas on devices of their own, behind LLM and AsyncLLM."""

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.replicas import Replicas
from jaxinfer.models.config import ModelConfig
from jaxinfer.startup.loading import EngineParts

# Two programs a replica do: steps of one token and of eight, with the sampler, which all requests here need.
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64, "num_gpu_blocks_override": 8}
ENGINE = {**SIZES, "enforce_eager": True, "use_tqdm_on_load": False, "block_size": 8, "max_logprobs": 2}
PROMPTS = [[3 + (7 * place + step) % 200 for step in range(5 + place)] for place in range(10)]
SAMPLING = [
    SamplingParams(temperature=0, max_tokens=24, logprobs=2)
    if place % 2
    else SamplingParams(temperature=1, max_tokens=8, n=2, seed=place)
    for place in range(10)
]


@pytest.fixture(scope="module")
def config(tiny_config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(tiny_config, num_hidden_layers=1)


@pytest.fixture(scope="module")
def params(config: ModelConfig, random_params: Callable[..., Any]) -> Callable[[int], Any]:
    return lambda seed: jax.tree.map(jax.numpy.asarray, random_params(config, seed))


@pytest.fixture(scope="module")
def two(config: ModelConfig, params: Callable[[int], Any]) -> Iterator[LLM]:
    with LLM(model_config=config, params=params(0), data_parallel_size=2, **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def one(two: LLM) -> LLM:
    """An engine on one device: the first replica alone."""
    parts = two._parts
    first = EngineParts(parts._replicas[:1], None, {}, None, parts._shapes, parts._shards)
    assert isinstance(first.engine, Engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxinfer.llm.load_engine", lambda *arguments: first)
        return LLM("model")


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def generate(llm: LLM) -> list[RequestOutput]:
    return llm.generate(PROMPTS, SAMPLING, use_tqdm=False)


def replicas(llm: LLM | AsyncLLM) -> Replicas:
    engine = llm._parts.engine
    assert isinstance(engine, Replicas)
    return engine


def test_outputs_are_those_of_one_device(one: LLM, two: LLM) -> None:
    """Greedy, seeded and with several samples; with eight blocks a replica some requests are preempted."""
    expected, found = generate(one), generate(two)
    assert tokens(found) == tokens(expected)
    assert [output.prompt_token_ids for output in found] == PROMPTS
    for mine, other in zip(found[1::2], expected[1::2], strict=True):
        for position, alternatives in enumerate(mine.outputs[0].logprobs or ()):
            reference = (other.outputs[0].logprobs or [])[position]
            assert alternatives.keys() == reference.keys()
            for token_id, entry in alternatives.items():
                assert entry.logprob == pytest.approx(reference[token_id].logprob, abs=1e-3)
    stats = two.stats()
    assert [part.num_generated_tokens > 40 for part in stats.replicas] == [True, True]
    assert stats.num_preemptions > 0 and stats.num_unfinished == 0
    assert stats.num_free_blocks == stats.num_blocks == 16


def test_replicas_lie_on_devices_of_their_own(two: LLM) -> None:
    for place, engine in enumerate(replicas(two).engines):
        runner: Any = engine.runner
        arrays = jax.tree.leaves((runner.kv, runner._state, runner.leaves))
        assert {leaf.device for leaf in arrays} == {jax.devices()[place]}


def test_beam_search(one: LLM, two: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    expected, found = (
        [[beam.tokens for beam in output.sequences] for output in llm.beam_search(PROMPTS[:2], params)]
        for llm in (one, two)
    )
    assert found == expected


def test_a_prefix_is_computed_once(two: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    prefix = list(range(100, 124))
    two.generate([*prefix, 1], greedy, use_tqdm=False)
    outputs = [two.generate([*prefix, token], greedy, use_tqdm=False)[0] for token in (2, 3)]
    assert [output.num_cached_tokens for output in outputs] == [24, 24]


def test_new_parameters_reach_all_and_sleep_changes_nothing(one: LLM, two: LLM, params: Callable[[int], Any]) -> None:
    before = tokens(generate(one))
    mine = params(5)
    two.update_params(mine)
    expected = tokens(generate(one))
    assert expected != before and tokens(generate(two)) == expected
    runner: Any = replicas(two).engines[0].runner
    assert all(leaf is given for leaf, given in zip(runner.leaves, jax.tree.leaves(mine), strict=True))
    del mine
    for level in (1, 2):
        two.sleep(level)
        assert two.is_sleeping() and not any(engine.runner.leaves for engine in replicas(two).engines)  # type: ignore[attr-defined]
        if level == 2:
            two.wake_up(["kv_cache"])
            two.update_params(params(5))
        else:
            two.wake_up()
        assert not two.is_sleeping() and tokens(generate(two)) == expected
    two.update_params(params(0))
    assert tokens(generate(two)) == before


def test_streams_and_aborts(one: LLM, two: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(generate(one))

    async def serve(llm: AsyncLLM) -> None:
        outputs = await asyncio.gather(*(llm.generate(p, s) for p, s in zip(PROMPTS, SAMPLING, strict=True)))
        assert tokens(list(outputs)) == expected
        long = SamplingParams(temperature=0, max_tokens=20, logprobs=0)
        streams = [llm.generate(PROMPTS[place], long, str(place)) for place in range(4)]
        firsts = [await anext(stream) for stream in streams]
        assert {replicas(llm)._router.replica_of(first.request_id) for first in firsts} == {0, 1}
        await llm.abort(["0", "1", "2", "3"])
        lasts = [[output async for output in stream][-1] for stream in streams]
        assert {last.outputs[0].finish_reason for last in lasts} == {"abort"}
        assert await llm.reset_prefix_cache()
        stats = llm.stats()
        assert stats.num_unfinished == 0 and stats.num_free_blocks == stats.num_blocks

    # The engine that is here already, which is not to be closed at the end.
    monkeypatch.setattr("jaxinfer.async_llm.load_engine", lambda *arguments: two._parts)
    monkeypatch.setattr(two._parts, "close", lambda: None)
    with AsyncLLM("model") as llm:
        asyncio.run(serve(llm))


def test_a_dead_replica_ends_its_own_requests_only(
    two: LLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of both replicas."""

    def fails(plan: Any) -> Any:
        raise RuntimeError("the device is gone")

    expected = tokens(generate(two))
    monkeypatch.setattr(replicas(two).engines[1].runner, "execute", fails)
    with pytest.warns(UserWarning, match="of 10 prompts ended with an error.*the device is gone"):
        outputs = generate(two)
    lived = [place for place, output in enumerate(outputs) if output.error is None and place]
    assert 3 <= len(lived) <= 7
    assert [tokens(outputs)[place] for place in lived] == [expected[place] for place in lived]
    assert all(output.error is None for output in generate(two))


def test_two_replicas_of_two_devices(one: LLM, config: ModelConfig, params: Callable[[int], Any]) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=10)
    expected = tokens(one.generate(PROMPTS, greedy, use_tqdm=False))
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 2}
    with LLM(model_config=config, params=params(0), **sizes, **ENGINE) as four:
        assert tokens(four.generate(PROMPTS, greedy, use_tqdm=False)) == expected
        for place, engine in enumerate(replicas(four).engines):
            runner: Any = engine.runner
            mine = set(jax.devices()[2 * place : 2 * place + 2])
            assert {device for leaf in runner.leaves for device in leaf.devices()} == mine
        assert all(part.num_generated_tokens > 30 for part in four.stats().replicas)
        four.sleep(1)
        four.wake_up()
        assert tokens(four.generate(PROMPTS, greedy, use_tqdm=False)) == expected
        four.update_params(params(5))
        changed = tokens(four.generate(PROMPTS, greedy, use_tqdm=False))
    assert changed != expected
    one._parts.sleep.update_params(params(5))
    one._parts.engine.params_changed()
    assert tokens(one.generate(PROMPTS, greedy, use_tqdm=False)) == changed


def test_more_replicas_than_devices(config: ModelConfig, params: Callable[[int], Any]) -> None:
    message = "data_parallel_size=10 needs as many devices, and this process has 9 .*jax_num_cpu_devices"
    with pytest.raises(ValueError, match=message):
        LLM(model_config=config, params=params(0), data_parallel_size=10, **ENGINE)


def test_numbers_that_are_none(config: ModelConfig, params: Callable[[int], Any]) -> None:
    for size, error in ((0, ValueError), (True, TypeError), (np.float32(2), TypeError)):
        with pytest.raises(error, match="data_parallel_size"):
            LLM(model_config=config, params=params(0), data_parallel_size=size, **ENGINE)
