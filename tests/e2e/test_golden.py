"""SmolLM2-135M-Instruct through the whole engine against transformers in float32: the same ids in every setting."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import LLM, SamplingParams

pytestmark = pytest.mark.real_model

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
ENGINE = {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True, "use_tqdm_on_load": False}


@pytest.fixture(scope="module")
def roomy(smollm2_path: Path) -> Iterator[LLM]:
    """All prompts at once, unchunked, in a pool with room for them."""
    with LLM(smollm2_path, max_num_seqs=12, num_gpu_blocks_override=512, **ENGINE) as llm:
        yield llm


def serve(llm: LLM, prompts: list[dict[str, Any]], params: SamplingParams = GREEDY) -> list[Any]:
    return llm.generate([{"prompt_token_ids": prompt["prompt_ids"]} for prompt in prompts], params, use_tqdm=False)


def check_ids(outputs: list[Any], prompts: list[dict[str, Any]]) -> None:
    got = {prompt["name"]: output.outputs[0].token_ids for prompt, output in zip(prompts, outputs, strict=True)}
    assert got == {prompt["name"]: prompt["greedy_ids"] for prompt in prompts}


@pytest.mark.parametrize("order", [1, -1], ids=["in order", "reversed"])
def test_together(roomy: LLM, golden: Mapping[str, Any], order: int) -> None:
    prompts = golden["prompts"][::order]
    check_ids(serve(roomy, prompts), prompts)
    assert roomy.stats().num_preemptions == 0


def test_alone(roomy: LLM, golden: Mapping[str, Any]) -> None:
    for prompt in golden["prompts"]:
        check_ids(serve(roomy, [prompt]), [prompt])


def test_prompts_chunked_at_a_budget_of_16(smollm2_path: Path, golden: Mapping[str, Any]) -> None:
    options = {"max_num_seqs": 12, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 512}
    with LLM(smollm2_path, **options, **ENGINE) as llm:
        check_ids(serve(llm, golden["prompts"]), golden["prompts"])
        assert llm.stats().num_steps > sum(len(prompt["prompt_ids"]) for prompt in golden["prompts"]) / 16


def test_a_pool_so_small_that_requests_are_preempted(smollm2_path: Path, golden: Mapping[str, Any]) -> None:
    with LLM(smollm2_path, max_num_seqs=12, num_gpu_blocks_override=50, **ENGINE) as llm:
        check_ids(serve(llm, golden["prompts"]), golden["prompts"])
        assert llm.stats().num_preemptions > 0


def test_logprobs_of_prompts_and_first_tokens(roomy: LLM, golden: Mapping[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, prompt_logprobs=0)
    for prompt, output in zip(golden["prompts"], serve(roomy, golden["prompts"], params), strict=True):
        expected = {entry["id"]: entry["logprob"] for entry in prompt["first_step_top"]}
        first = output.outputs[0].logprobs[0]
        assert {token: first[token].logprob for token in expected} == pytest.approx(expected, abs=1e-3)
        assert output.prompt_logprobs[0] is None
        scored = zip(prompt["prompt_ids"][1:], output.prompt_logprobs[1:], strict=True)
        assert [entry[token].logprob for token, entry in scored] == pytest.approx(prompt["prompt_logprobs"], abs=1e-3)


def test_text_and_chat_prompts_tokenise_to_the_same_ids(roomy: LLM, golden: Mapping[str, Any]) -> None:
    one = SamplingParams(temperature=0, max_tokens=1)
    for prompt in golden["prompts"]:
        if prompt["messages"]:
            output = roomy.chat(prompt["messages"], one, use_tqdm=False)[0]
        else:
            output = roomy.generate(prompt["text"], one, use_tqdm=False)[0]
        assert output.prompt_token_ids == prompt["prompt_ids"]
        assert output.outputs[0].token_ids == prompt["greedy_ids"][:1]
