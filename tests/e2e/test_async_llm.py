"""AsyncLLM: streaming, awaiting, merging for slow consumers, and field case 6 in all its ways to lose a consumer."""

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import (
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    EngineDeadError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
DELTA = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

BecomesIdle = Callable[[AsyncLLM], Awaitable[bool]]


def first_ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def test_vllms_async_sample(scripted_checkpoint: Callable[..., Path]) -> None:
    model = str(scripted_checkpoint([*b" Paris", 257]))

    # From here on vLLM's streaming sample with the import changed.
    async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> str:
        sampling_params = SamplingParams(
            max_tokens=100, temperature=0.8, top_k=1, seed=42, output_kind=RequestOutputKind.DELTA
        )
        text = ""
        async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=sampling_params):
            for completion in output.outputs:
                text += completion.text
            if output.finished:
                break
        return text

    async def main() -> list[str]:
        engine_args = AsyncEngineArgs(model=model, enforce_eager=True)
        engine = AsyncLLM.from_engine_args(engine_args)
        try:
            return [await stream_response(engine, prompt, f"stream-{i}") for i, prompt in enumerate(["is ", "to "])]
        finally:
            engine.shutdown()

    assert AsyncLLMEngine is AsyncLLM
    assert asyncio.run(main()) == ["Paris", "Paris"]


def test_gather(async_llm: AsyncLLM) -> None:
    async def main() -> list[RequestOutput]:
        prompts = [f"prompt {i}" for i in range(9)]
        return await asyncio.gather(*[async_llm.generate(prompt, GREEDY) for prompt in prompts])

    outputs = asyncio.run(main())
    assert [output.prompt for output in outputs] == [f"prompt {i}" for i in range(9)]
    assert all(output.finished and len(first_ids(output)) == 12 for output in outputs)
    assert len({output.request_id for output in outputs}) == 9
    assert [first_ids(output) for output in asyncio.run(main())] == [first_ids(output) for output in outputs]


def test_outputs_of_every_kind(async_llm: AsyncLLM) -> None:
    async def collect(kind: RequestOutputKind) -> list[RequestOutput]:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, output_kind=kind)
        return [output async for output in async_llm.generate("abc", params)]

    async def main() -> None:
        expected = first_ids(await async_llm.generate("abc", GREEDY))
        cumulative = await collect(RequestOutputKind.CUMULATIVE)
        assert [first_ids(output) for output in cumulative] == [expected[: len(first_ids(out))] for out in cumulative]
        assert [len(first_ids(output)) for output in cumulative] == sorted({len(first_ids(o)) for o in cumulative})
        deltas = await collect(RequestOutputKind.DELTA)
        assert [token for output in deltas for token in first_ids(output)] == expected
        assert "".join(output.outputs[0].text for output in deltas) == cumulative[-1].outputs[0].text
        (final,) = await collect(RequestOutputKind.FINAL_ONLY)
        assert first_ids(final) == expected
        for outputs in (cumulative, deltas, [final]):
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]

    asyncio.run(main())


def test_a_slow_consumer_gets_fewer_and_larger_outputs(async_llm: AsyncLLM) -> None:
    async def main() -> None:
        params = SamplingParams(
            n=2, temperature=1, seed=3, max_tokens=40, ignore_eos=True, logprobs=0, output_kind=RequestOutputKind.DELTA
        )
        expected = await async_llm.generate("abc", params)
        found: dict[int, list[Any]] = {0: [], 1: []}
        texts, logprobs, count = {0: "", 1: ""}, {0: 0, 1: 0}, 0
        async for output in async_llm.generate("abc", params):
            await asyncio.sleep(0.1 if count == 0 else 0.02)
            count += 1
            for completion in output.outputs:
                found[completion.index] += completion.token_ids
                texts[completion.index] += completion.text
                logprobs[completion.index] += len(completion.logprobs or ())
        assert count < 40
        for completion in expected.outputs:
            assert found[completion.index] == completion.token_ids
            assert texts[completion.index] == completion.text
            assert logprobs[completion.index] == 40

    asyncio.run(main())


def test_a_blocked_loop_piles_nothing_up(async_llm: AsyncLLM) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        calls: list[Any] = []
        original = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args, **kwargs: (calls.append(args), original(*args, **kwargs))[1]  # type: ignore
        stream = async_llm.generate("abc", LONG)
        await anext(stream)
        calls.clear()
        time.sleep(0.3)
        assert len(calls) <= 2
        await stream.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("hold", [True, False], ids=["held", "dropped"])
@pytest.mark.parametrize("n", [1, 3])
def test_cancelled_while_waiting_for_an_item(
    async_llm: AsyncLLM, becomes_idle: BecomesIdle, hold: bool, n: int
) -> None:
    async def main() -> None:
        params = LONG if n == 1 else SamplingParams(n=n, max_tokens=500, ignore_eos=True)
        three = asyncio.Event()
        held = async_llm.generate("abc", params)

        async def consume() -> None:
            count = 0
            async for _ in held if hold else async_llm.generate("abc", params):
                count += 1
                if count == 3:
                    three.set()

        task = asyncio.create_task(consume())
        await three.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await becomes_idle(async_llm)

    asyncio.run(main())


def test_break_then_aclose(async_llm: AsyncLLM, becomes_idle: BecomesIdle) -> None:
    async def main() -> None:
        stream = async_llm.generate("abc", LONG)
        async for _ in stream:
            break
        assert async_llm.stats().num_running == 1
        await stream.aclose()
        await stream.aclose()
        assert await becomes_idle(async_llm)
        assert [output async for output in stream] == []

    asyncio.run(main())


def test_break_alone(async_llm: AsyncLLM, becomes_idle: BecomesIdle) -> None:
    async def main() -> None:
        async for _ in async_llm.generate("abc", LONG):
            break
        assert await becomes_idle(async_llm)

    asyncio.run(main())


def test_cancelled_between_two_items(async_llm: AsyncLLM, becomes_idle: BecomesIdle) -> None:
    async def main() -> None:
        started = asyncio.Event()
        stream = async_llm.generate("abc", LONG)

        async def consume() -> None:
            async for _ in stream:
                started.set()
                await asyncio.sleep(30)

        task = asyncio.create_task(consume())
        await started.wait()
        task.cancel()
        assert await becomes_idle(async_llm)  # although task and stream are both still held

    asyncio.run(main())


def test_timeout(async_llm: AsyncLLM, becomes_idle: BecomesIdle) -> None:
    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(async_llm.generate("abc", LONG), 0.05)
        assert await becomes_idle(async_llm)
        stream = async_llm.generate("abc", LONG)
        await asyncio.wait_for(anext(stream), 10)  # each item in a task of its own
        await asyncio.wait_for(anext(stream), 10)
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.05):
                async for _ in stream:
                    pass
        assert await becomes_idle(async_llm)

    asyncio.run(main())


def test_cancelled_in_the_queue(async_llm: AsyncLLM, becomes_idle: BecomesIdle) -> None:
    async def main() -> None:
        running = [asyncio.ensure_future(async_llm.generate("abc", LONG)) for _ in range(4)]
        queued = [asyncio.ensure_future(async_llm.generate("def", LONG)) for _ in range(3)]
        while async_llm.stats().num_waiting < 3 or async_llm.stats().num_running < 4:
            await asyncio.sleep(0)
        for task in queued:
            task.cancel()
        while async_llm.stats().num_waiting:
            await asyncio.sleep(0)
        assert async_llm.stats().num_running == 4
        for task in running:
            task.cancel()
        assert await becomes_idle(async_llm)

    asyncio.run(main())


def test_abort(async_llm: AsyncLLM, becomes_idle: BecomesIdle) -> None:
    async def main() -> None:
        for params in (LONG, SamplingParams(n=3, max_tokens=500, ignore_eos=True)):
            stream = async_llm.generate("abc", params, "mine")
            await anext(stream)
            await async_llm.abort("mine")
            await async_llm.abort(["mine", "unknown"])
            last = [output async for output in stream][-1]
            assert last.finished and {completion.finish_reason for completion in last.outputs} == {"abort"}
            assert await becomes_idle(async_llm)
            await async_llm.abort("mine")
        awaited = asyncio.ensure_future(async_llm.generate("abc", LONG, "other"))
        while not async_llm.stats().num_running:
            await asyncio.sleep(0)
        await async_llm.abort(iter(["other"]))
        assert (await awaited).outputs[0].finish_reason == "abort"

    asyncio.run(main())


def test_a_hundred_rounds_of_start_and_cancel(async_llm: AsyncLLM, becomes_idle: BecomesIdle) -> None:
    async def main() -> None:
        before = first_ids(await async_llm.generate("abc", GREEDY))
        for i in range(100):
            task = asyncio.ensure_future(async_llm.generate("abc", LONG))
            await asyncio.sleep(0.002 * (i % 5))
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert await becomes_idle(async_llm)
        assert first_ids(await async_llm.generate("abc", GREEDY)) == before

    asyncio.run(main())


def test_refused_requests(async_llm: AsyncLLM) -> None:
    async def main() -> None:
        bad: list[tuple[Any, Any, type[Exception], str]] = [
            ("", GREEDY, ValueError, "empty"),
            ("x" * 600, GREEDY, ValueError, "600 tokens.*max_model_len=512"),
            ([300], GREEDY, ValueError, "300"),
            (3, GREEDY, TypeError, "3"),
            ("a", [GREEDY], TypeError, "sampling_params"),
            ("a", SamplingParams(stop_token_ids=[-1]), ValueError, "stop_token_ids"),
        ]
        for prompt, params, error, message in bad:
            with pytest.raises(error, match=message):
                await async_llm.generate(prompt, params)
            with pytest.raises(error, match=message):
                async for _ in async_llm.generate(prompt, params):
                    pass
        with pytest.raises(ValueError, match="lora_request"):
            async_llm.generate("a", GREEDY, lora_request="adapter")
        with pytest.raises(TypeError, match="request_id=7"):
            await async_llm.generate("a", GREEDY, 7)  # type: ignore[arg-type]
        assert (await async_llm.generate("a", GREEDY)).finished

    asyncio.run(main())


def test_an_id_in_use_is_refused_and_its_owner_goes_on(async_llm: AsyncLLM) -> None:
    async def main() -> None:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        owner = async_llm.generate("abc", params, "same")
        await anext(owner)
        with pytest.raises(ValueError, match="request_id='same' is in use"):
            await async_llm.generate("abc", GREEDY, "same")
        outputs = [output async for output in owner]
        assert len(first_ids(outputs[-1])) == 60 and outputs[-1].outputs[0].finish_reason == "length"
        assert (await async_llm.generate("abc", GREEDY, "same")).finished

    asyncio.run(main())


def test_a_stream_is_used_once(async_llm: AsyncLLM) -> None:
    async def main() -> None:
        stream = async_llm.generate("abc", GREEDY)
        assert (await stream).finished
        with pytest.raises(RuntimeError, match="awaited already"):
            await stream
        assert [output async for output in stream] == []
        steps = async_llm.stats().num_steps
        async_llm.generate("never used", GREEDY)
        await asyncio.sleep(0.05)
        assert async_llm.stats().num_steps == steps

    asyncio.run(main())


def test_a_second_consumer_is_refused_and_the_first_goes_on(async_llm: AsyncLLM) -> None:
    async def main() -> None:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
        stream = async_llm.generate("abc", params)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task waits for this request's next output"):
            await asyncio.wait_for(anext(stream), 5)
        assert len(first_ids(await asyncio.wait_for(first, 20))) == 12

    asyncio.run(main())


def test_chat_tokenizer_and_defaults(async_llm: AsyncLLM) -> None:
    template = "{% for m in messages %}{{ m.content }};{% endfor %}"

    async def main() -> None:
        output = await async_llm.chat([{"role": "user", "content": "hi"}], GREEDY, chat_template=template)
        assert output.prompt == "hi;"
        assert (await async_llm.get_tokenizer()).decode(list(b"hi")) == "hi"
        assert async_llm.get_default_sampling_params() == SamplingParams()
        assert len(first_ids(await async_llm.generate([5]))) <= 16

    asyncio.run(main())


def test_loops_in_two_threads(async_llm: AsyncLLM) -> None:
    async def main() -> list[int]:
        return first_ids(await async_llm.generate("abc", GREEDY))

    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(asyncio.run(main()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [asyncio.run(main())] * 3


def test_a_loop_that_ends_takes_its_requests_along(async_llm: AsyncLLM, becomes_idle: BecomesIdle) -> None:
    kept = []

    async def main() -> None:
        stream = async_llm.generate("abc", LONG)
        await anext(stream)
        kept.append(stream)  # neither cancelled nor dropped: only its loop is gone

    asyncio.run(main())
    assert asyncio.run(becomes_idle(async_llm))


def test_update_params(tiny_config: Any, tiny_params: Callable[[int], Any], small: dict[str, Any]) -> None:
    async def main() -> None:
        with AsyncLLM(model_config=tiny_config, params=tiny_params(2), **small) as other:
            expected = first_ids(await other.generate([1, 2, 3], GREEDY))
        async with AsyncLLM(model_config=tiny_config, params=tiny_params(1), **small) as engine:
            assert first_ids(await engine.generate([1, 2, 3], GREEDY)) != expected
            await engine.update_params(tiny_params(2))
            assert first_ids(await engine.generate([1, 2, 3], GREEDY)) == expected
            with pytest.raises(ValueError, match="final_norm"):
                await engine.update_params({**tiny_params(2), "final_norm": {}})

    asyncio.run(main())


def test_shutdown(tiny_config: Any, tiny_params: Callable[[int], Any], small: dict[str, Any]) -> None:
    async def main() -> None:
        threads = threading.active_count()
        engine = AsyncLLM(model_config=tiny_config, params=tiny_params(0), **small)
        assert threading.active_count() == threads  # the engine's thread starts with the first request
        stream = engine.generate([1, 2], LONG)
        await anext(stream)
        engine.shutdown()
        engine.shutdown()
        assert threading.active_count() == threads
        with pytest.raises(EngineDeadError, match="shut down"):
            async for _ in stream:
                pass
        for call in (engine.generate([1], GREEDY), engine.abort("x"), engine.check_health()):
            with pytest.raises(EngineDeadError, match="shut down"):
                await call

    asyncio.run(main())
    gc.collect()


def test_a_failed_step(
    tiny_config: Any, tiny_params: Callable[[int], Any], small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        with AsyncLLM(model_config=tiny_config, params=tiny_params(0), **small) as engine:
            await engine.check_health()
            stream = engine.generate([1, 2], LONG)
            await anext(stream)

            def fail(plan: object) -> None:
                raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

            monkeypatch.setattr(engine._parts.engine.runner, "execute", fail)
            last = [output async for output in stream][-1]
            assert last.outputs[0].finish_reason == "error" and "RESOURCE_EXHAUSTED" in (last.error or "")
            for call in (engine.generate([1], GREEDY), engine.check_health()):
                with pytest.raises(EngineDeadError, match="RESOURCE_EXHAUSTED"):
                    await call

    asyncio.run(main())


def test_the_interpreter_ends_with_a_forgotten_engine(scripted_checkpoint: Callable[..., Path]) -> None:
    import subprocess
    import sys

    program = (
        "import asyncio, sys\n"
        "from jaxinfer import AsyncLLM, SamplingParams\n"
        "llm = AsyncLLM(sys.argv[1], enforce_eager=True, compilation_cache_dir=False)\n"
        "async def main():\n"
        "    stream = llm.generate([5], SamplingParams(max_tokens=400, ignore_eos=True))\n"
        "    await anext(stream); print('ok', flush=True)\n"
        "    return stream\n"
        "stream = asyncio.run(main())\n"
    )
    model = str(scripted_checkpoint([5, 6, 7, 5]))
    done = subprocess.run([sys.executable, "-c", program, model], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
