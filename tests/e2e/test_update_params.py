"""New weights between two steps: nothing is copied or compiled, and every token says which weights made it."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, AsyncLLM, SamplingParams
from jaxinfer.engine.sampling_params import RequestOutputKind
from jaxinfer.engine.version_runs import VersionRuns, joined_runs
from jaxinfer.models.decoder import param_shapes

PROMPT = [5, 9, 17, 33]
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


@pytest.fixture(scope="module")
def weights(tiny_config: Any, tiny_params: Callable[[int], Any]) -> list[Any]:
    return [jax.tree.map(jnp.asarray, tiny_params(seed)) for seed in (0, 1)]


@pytest.fixture(scope="module")
def swapped(tiny_config: Any, weights: list[Any], small: dict[str, Any]) -> Iterator[LLM]:
    with LLM(model_config=tiny_config, params=weights[0], **small) as llm:
        yield llm


def ids(llm: LLM, params: SamplingParams = SHORT) -> list[int]:
    return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids


def test_runs_of_versions() -> None:
    runs = VersionRuns()
    for version in (0, 0, 0, 2, 2, 3):
        runs.add(version)
    assert runs.between(0, 6) == [(0, 3), (2, 2), (3, 1)]
    assert runs.between(2, 4) == [(0, 1), (2, 1)]
    assert runs.between(3, 3) == []
    assert joined_runs([(0, 3), (2, 1)], [(2, 1), (3, 1)]) == [(0, 3), (2, 2), (3, 1)]
    assert joined_runs([(0, 1)], [(1, 1)]) == [(0, 1), (1, 1)]


def test_no_copy_and_no_compilation(swapped: LLM, weights: list[Any]) -> None:
    first = ids(swapped)
    compiled, before = swapped.stats().num_compiled, swapped.weight_version
    swapped.update_params(weights[1])
    pointers = [leaf.unsafe_buffer_pointer() for leaf in swapped._parts.engine.runner._leaves]
    assert pointers == [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(weights[1])]
    result = swapped.generate(PROMPT, SHORT, use_tqdm=False)[0]
    assert result.num_cached_tokens == 0  # the old weights' keys and values are not found
    assert result.outputs[0].token_ids != first
    assert result.outputs[0].weight_versions == [(before + 1, 6)]
    swapped.update_params(weights[0])
    assert ids(swapped) == first
    assert swapped.stats().num_compiled == compiled
    assert swapped.weight_version == before + 2


def test_300_leaves_take_less_than_5_ms(tiny_config: Any, small: dict[str, Any]) -> None:
    config = dataclasses.replace(tiny_config, num_hidden_layers=50, hidden_size=16, intermediate_size=16)
    zeros = jax.tree.map(lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)), param_shapes(config))
    params = [zeros, jax.tree.map(jnp.array, zeros)]
    assert len(jax.tree.leaves(params[0])) > 300
    with LLM(model_config=config, params=params[0], max_model_len=32, **small) as llm:
        seconds = []
        for turn in range(9):
            start = time.perf_counter()
            llm.update_params(params[turn % 2])
            seconds.append(time.perf_counter() - start)
    assert min(seconds) < 5e-3, seconds  # the best: others use the machine as well


def test_a_tree_that_does_not_match_changes_nothing(swapped: LLM, weights: list[Any]) -> None:
    expected, version = ids(swapped), swapped.weight_version
    other = weights[1]
    short = {**other, "final_norm": {"scale": other["final_norm"]["scale"][:-1]}}
    half = {**other, "lm_head": {"kernel": other["lm_head"]["kernel"].astype(jnp.bfloat16)}}
    missing = {name: leaf for name, leaf in other.items() if name != "layers_1"}
    for wrong, leaf in ((short, "final_norm/scale"), (half, "lm_head/kernel"), (missing, "layers_1")):
        with pytest.raises(ValueError, match=leaf):
            swapped.update_params(wrong)
    with pytest.raises(ValueError, match="mode='now' must be 'keep'"):
        swapped.update_params(other, mode="now")  # type: ignore[arg-type]
    assert (ids(swapped), swapped.weight_version) == (expected, version)


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_another_thread_generates(swapped: LLM, weights: list[Any], mode: str) -> None:
    """LLM.generate holds the engine for all its steps; an update comes between two of them."""
    version = swapped.weight_version
    results: list[Any] = []
    params = dataclasses.replace(LONG, max_tokens=400)
    thread = threading.Thread(target=lambda: results.extend(swapped.generate([PROMPT] * 2, params, use_tqdm=False)))
    steps = swapped.stats().num_steps
    thread.start()
    while swapped.stats().num_steps < steps + 20:
        time.sleep(0.001)
    swapped.update_params(weights[1], mode=mode)  # type: ignore[arg-type]
    assert swapped.weight_version == version + 1
    thread.join()
    for output in results:
        (sample,) = output.outputs
        assert sum(count for _, count in sample.weight_versions) == len(sample.token_ids)
        if mode == "keep":
            assert [run for run, _ in sample.weight_versions] == [version, version + 1]
            assert len(sample.token_ids) == 400
        elif mode == "abort":
            assert sample.finish_reason == "abort" and 10 < len(sample.token_ids) < 400
            assert [run for run, _ in sample.weight_versions] == [version]
        else:
            assert sample.weight_versions == [(version, 400)]
    assert len(results) == 2
    swapped.update_params(weights[0])


def test_waiting_for_oneself_is_refused(swapped: LLM, weights: list[Any]) -> None:
    caught: list[Exception] = []

    class Bar:
        format_dict: Any = {}  # noqa: RUF012

        def __init__(self, **_: Any) -> None: ...

        def update(self, *_: Any) -> None:
            if not caught:
                try:
                    swapped.update_params(weights[0], mode="wait")
                except ValueError as error:
                    caught.append(error)

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

    varied = [SHORT, dataclasses.replace(SHORT, max_tokens=30)]
    swapped.generate([PROMPT, PROMPT], varied, use_tqdm=Bar)
    assert "would wait for itself" in str(caught[0])


@pytest.fixture(scope="module")
def served(tiny_config: Any, weights: list[Any], small: dict[str, Any]) -> Iterator[AsyncLLM]:
    with AsyncLLM(model_config=tiny_config, params=weights[0], **small) as engine:
        yield engine


async def rest_of(stream: Any) -> tuple[list[int], list[tuple[int, int]], str | None]:
    """Everything that a stream of deltas still says."""
    tokens: list[int] = []
    runs: list[tuple[int, int]] = []
    reason = None
    async for output in stream:
        (sample,) = output.outputs
        tokens += sample.token_ids
        runs = joined_runs(runs, sample.weight_versions)
        reason = sample.finish_reason
    return tokens, runs, reason


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_streams_under_way(served: AsyncLLM, weights: list[Any], mode: str) -> None:
    async def main() -> None:
        version = served.weight_version
        stream = served.generate(PROMPT, LONG)
        first = (await anext(stream)).outputs[0]
        reader = asyncio.create_task(rest_of(stream))
        update = asyncio.create_task(served.update_params(weights[1], mode=mode))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        late = await served.generate(PROMPT, SHORT)
        await update
        tokens, runs, reason = await reader
        runs = joined_runs(first.weight_versions, runs)
        assert late.outputs[0].weight_versions == [(version + 1, 6)]
        if mode == "keep":
            assert [run for run, _ in runs] == [version, version + 1]
            assert sum(count for _, count in runs) == len(first.token_ids + tokens) == 300
        elif mode == "abort":
            assert reason == "abort" and [run for run, _ in runs] == [version]
        else:
            assert runs == [(version, 300)] and reason == "length"
        await served.update_params(weights[0])

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_pause_and_resume(served: AsyncLLM, weights: list[Any], mode: str) -> None:
    async def main() -> None:
        expected = (await served.generate(PROMPT, SHORT)).outputs[0].token_ids
        stream = served.generate(PROMPT, LONG)
        first = (await anext(stream)).outputs[0].token_ids
        reader = asyncio.create_task(rest_of(stream))
        await served.pause_generation(mode=mode)  # type: ignore[arg-type]
        assert await served.is_paused()
        steps = served.stats().num_steps
        late = asyncio.create_task(served.generate(PROMPT, SHORT)._final())
        gone = asyncio.create_task(served.generate(PROMPT, SHORT, "gone")._final())
        dropped = asyncio.create_task(served.generate(PROMPT, SHORT)._final())
        await asyncio.sleep(0.05)
        assert served.stats().num_steps == steps and not late.done()
        dropped.cancel()
        await served.abort("gone")
        assert (await gone).outputs[0].finish_reason == "abort"
        if mode == "keep":
            with pytest.raises(ValueError, match="would wait for ever"):
                await served.update_params(weights[1], mode="wait")
        await served.resume_generation()
        assert not await served.is_paused()
        assert (await late).outputs[0].token_ids == expected
        tokens, _, reason = await reader
        assert reason == ("abort" if mode == "abort" else "length")
        if mode != "abort":
            assert (first + tokens)[:6] == expected and len(first + tokens) == 300
        assert served.stats().num_unfinished == 0

    asyncio.run(main())


def test_an_unknown_mode_changes_nothing(served: AsyncLLM, weights: list[Any]) -> None:
    async def main() -> None:
        for call in (lambda: served.update_params(weights[0], mode="later"), lambda: served.pause_generation("later")):  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="mode='later'"):
                await call()
        assert not await served.is_paused()

    asyncio.run(main())
