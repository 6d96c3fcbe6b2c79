"""compute_logprobs: the engine scores sequences that are given."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer import LLM, AsyncLLM, SamplingParams
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.sequence import SequenceDecoder

LENGTH = 40
Reference = Callable[..., np.ndarray]


@pytest.fixture(scope="module")
def sized(small: dict[str, Any]) -> dict[str, Any]:
    return small | {"max_model_len": LENGTH}


@pytest.fixture(scope="module")
def scorer(tiny_config: ModelConfig, tiny_params: Any, sized: dict[str, Any]) -> Iterator[LLM]:
    with LLM(model_config=tiny_config, params=tiny_params(0), **sized) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(tiny_config: ModelConfig, tiny_params: Any) -> Reference:
    """`reference(ids, temperature=1.0)`: of each token but the first, whole sequences without a cache, in float64."""
    run = jax.jit(SequenceDecoder(tiny_config).__call__)

    def logprobs(ids: list[int], temperature: float = 1.0) -> np.ndarray:
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(ids)] = ids
        logits = np.asarray(run(tiny_params(0), padded), np.float64)[0, : len(ids) - 1] / temperature
        wide = logits - logits.max(-1, keepdims=True)
        return (wide - np.log(np.exp(wide).sum(-1, keepdims=True)))[np.arange(len(ids) - 1), ids[1:]]

    return logprobs


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 256, count).tolist() for count in (2, LENGTH, 17, 5, 33)]


def test_each_token_given_its_prefix(scorer: LLM, reference: Reference, sequences: list[list[int]]) -> None:
    """A sequence may be as long as max_model_len; arrays do as well as lists."""
    found = scorer.compute_logprobs([sequences[0], np.array(sequences[1]), *sequences[2:]])
    for ids, logprobs in zip(sequences, found, strict=True):
        assert logprobs.dtype == np.float32
        np.testing.assert_allclose(logprobs, reference(ids), atol=1e-3)
    (cooler,) = scorer.compute_logprobs([sequences[2]], temperature=0.6)
    np.testing.assert_allclose(cooler, reference(sequences[2], 0.6), atol=2e-3)
    compiled = scorer.stats().num_compiled
    scorer.compute_logprobs(sequences, temperature=1.7)
    assert scorer.stats().num_compiled == compiled


def test_from_a_token_on(scorer: LLM, reference: Reference, sequences: list[list[int]]) -> None:
    starts = [1, 20, 16, 5, 32]
    before = scorer.stats().num_steps
    found = scorer.compute_logprobs(sequences, start=starts)
    assert scorer.stats().num_steps - before < 20  # what is not scored goes through in chunks
    for ids, start, logprobs in zip(sequences, starts, found, strict=True):
        assert len(logprobs) == len(ids) - start
        np.testing.assert_allclose(logprobs, reference(ids)[start - 1 :], atol=1e-3)
    assert [len(one) for one in scorer.compute_logprobs([[7], [7, 8]])] == [0, 1]
    assert scorer.compute_logprobs([]) == []


def test_beside_requests_that_generate(
    tiny_config: ModelConfig, tiny_params: Any, sized: dict[str, Any], reference: Reference, sequences: list[list[int]]
) -> None:
    async def main(llm: AsyncLLM) -> None:
        drawn = llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=0))
        output, found = await asyncio.gather(drawn._final(), llm.compute_logprobs(sequences, start=2))
        for ids, logprobs in zip(sequences, found, strict=True):
            np.testing.assert_allclose(logprobs, reference(ids)[1:], atol=1e-3)
        (own,) = await llm.compute_logprobs([[1, 2, 3, *output.outputs[0].token_ids]], start=3)
        assert own.sum() == pytest.approx(output.outputs[0].cumulative_logprob, abs=1e-2)

    with AsyncLLM(model_config=tiny_config, params=tiny_params(0), **sized) as llm:
        asyncio.run(main(llm))


@pytest.mark.parametrize(
    ("token_ids", "options", "message"),
    [
        ([[1, 2], []], {}, r"token_ids\[1\] is empty"),
        ([[1, 2]], {"start": 0}, "start=0 of token_ids.* from 1 to its 2 tokens"),
        ([[1, 2]], {"start": [1, 1]}, "start has 2 entries for 1 sequences"),
        ([[1, 2]], {"temperature": 0}, "temperature=0 must be above 0"),
        ([[1, 256, 2]], {}, "prompt_token_ids holds 256"),
        ([[1, 256]], {}, "token_ids holds 256"),
        ([[1] * 42], {}, "max_model_len=40"),
    ],
)
def test_refusals(scorer: LLM, token_ids: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scorer.compute_logprobs(token_ids, **options)
    assert scorer.stats().num_unfinished == 0


@pytest.mark.parametrize(
    ("token_ids", "options", "message"),
    [
        ([1, 2, 3], {}, r"token_ids\[0\] must be a list of ints.*\[\[1, 2, 3\]\]"),
        (None, {}, "token_ids=None must be a list of sequences"),
        ("text", {}, "token_ids='text' must be a list of sequences"),
        ([[1, 2]], {"start": True}, r"start=True of token_ids\[0\] must be an int"),
        ([[1, 2]], {"start": [1.0]}, r"start=1.0 of token_ids\[0\] must be an int"),
        ([[1, 2]], {"start": None}, "start=None must be an int, or a list"),
    ],
)
def test_wrong_types(scorer: LLM, token_ids: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        scorer.compute_logprobs(token_ids, **options)


def test_starts_of_numpy(scorer: LLM) -> None:
    found = [scorer.compute_logprobs([[1, 2, 3]], start=start) for start in (np.int64(2), np.array([2]), 2)]
    assert [[len(one) for one in each] for each in found] == [[1]] * 3
