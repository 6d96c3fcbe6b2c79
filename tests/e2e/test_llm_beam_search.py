"""beam_search() of LLM and AsyncLLM as vLLM's users call it; what it finds is tested elsewhere."""

import asyncio
from typing import Any

import pytest

from jaxinfer import LLM, AsyncLLM, BeamSearchOutput, BeamSearchParams, BeamSearchSequence, SamplingParams

PARAMS = BeamSearchParams(beam_width=3, max_tokens=5)


def test_vllms_beam_search(llm: LLM) -> None:
    prompts = [{"prompt": "Hello"}, {"prompt_token_ids": [7, 8, 9]}]
    outputs = llm.beam_search(prompts, PARAMS)
    assert [type(output) for output in outputs] == [BeamSearchOutput] * 2
    tokenizer = llm.get_tokenizer()
    for output, prompt_ids in zip(outputs, (tokenizer.encode("Hello"), [7, 8, 9]), strict=True):
        assert output.error is None and len(output.sequences) == 3
        for sequence in output.sequences:
            assert type(sequence) is BeamSearchSequence
            assert sequence.tokens[: len(prompt_ids)] == prompt_ids
            assert len(sequence.logprobs) == 5 and sequence.finish_reason == "length"
            assert sequence.text == tokenizer.decode(sequence.tokens)
            chosen = zip(sequence.logprobs, sequence.tokens[len(prompt_ids) :], strict=True)
            assert sum(entry[token].logprob for entry, token in chosen) == pytest.approx(sequence.cum_logprob)
        sums = [sequence.cum_logprob for sequence in output.sequences]
        assert sums == sorted(sums, reverse=True)  # all are of one length
    assert llm.beam_search("Hello", PARAMS)[0].sequences[0].tokens == outputs[0].sequences[0].tokens


def test_one_beam_is_greedy(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (beams,) = llm.beam_search("abc", BeamSearchParams(1, 6, ignore_eos=True))
    (output,) = llm.generate("abc", greedy, use_tqdm=False)
    assert beams.sequences[0].tokens == output.prompt_token_ids + output.outputs[0].token_ids


def test_what_cannot_be_served(llm: LLM) -> None:
    with pytest.warns(UserWarning, match="1 of 2 prompts ended with an error"):
        good, bad = llm.beam_search([[1, 2], [1] * 5000], PARAMS)
    assert good.error is None and bad.error is not None and "max_model_len" in bad.error
    assert bad.sequences == []
    with pytest.raises(TypeError, match="must be BeamSearchParams"):
        llm.beam_search("abc", SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="concurrency_limit=2"):
        llm.beam_search("abc", PARAMS, concurrency_limit=2)


def test_async(async_llm: AsyncLLM, becomes_idle: Any) -> None:
    async def main() -> list[Any]:
        one, two, other = await asyncio.gather(
            async_llm.beam_search("Hello", PARAMS),
            async_llm.beam_search("Hello", PARAMS, "mine"),
            async_llm.generate("Hello", SamplingParams(temperature=0, max_tokens=5)),
        )
        assert two.request_id == "mine" and other.finished
        iterated = [output async for output in async_llm.beam_search("Hello", PARAMS)]
        with pytest.raises(TypeError, match="must be BeamSearchParams"):
            await async_llm.beam_search("Hello", SamplingParams())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="max_model_len"):
            await async_llm.beam_search([1] * 5000, PARAMS)
        task = asyncio.create_task(_collect(async_llm.beam_search("a", BeamSearchParams(4, 400, ignore_eos=True))))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await becomes_idle(async_llm)
        return [one, two, *iterated]

    outputs = asyncio.run(main())
    assert len(outputs) == 3
    ids = [[sample.token_ids for sample in output.outputs] for output in outputs]
    assert ids[0] == ids[1] == ids[2]
    assert [len(beams) for beams in ids] == [3, 3, 3]
    assert all(len(sample.text) > 0 and output.finished for output in outputs for sample in output.outputs)


async def _collect(stream: Any) -> Any:
    return await stream
