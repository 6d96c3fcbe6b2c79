"""Families through the whole engine: transformers' ids and log-probabilities, whatever else is in the batch."""

from typing import Any

import numpy as np
import pytest

from jaxinfer import LLM, RequestOutput, SamplingParams
from jaxinfer.checkpoint import load_params, open_checkpoint

Case = Any  # conftest's FamilyCase
SERVED = ["mistral", "gemma2", "gemma3", "qwen3", "mixtral", "gpt2"]
# Sequences of 32 tokens take 8 blocks: three that run together do not fit, so one waits.
SMALL = {"max_num_seqs": 3, "block_size": 4, "num_gpu_blocks_override": 20, "max_model_len": 32}
QUIET = {"enforce_eager": True, "use_tqdm_on_load": False, "skip_tokenizer_init": True}
CUTS = (5, 8, 9, 17)


def jobs(case: Case) -> list[tuple[list[int], list[int]]]:
    """Prompts and what transformers says after them: the text, the text with some of what follows it, and its
    beginnings."""
    text, greedy = case.tokens, case.greedy
    first = case.logits(len(text)).argmax(-1)
    continued = [(text + greedy[:cut], greedy[cut:]) for cut in (3, 5)]
    return [(text, greedy), *continued, *((text[:cut], [int(first[cut - 1])]) for cut in CUTS)]


def check(case: Case, outputs: list[RequestOutput]) -> None:
    logits = case.logits(len(case.tokens)).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for output, (prompt, expected) in zip(outputs, jobs(case), strict=True):
        assert output.outputs[0].token_ids == expected, f"after {len(prompt)} tokens"
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        scored = min(len(prompt), len(case.tokens))
        found = [output.prompt_logprobs[i][prompt[i]].logprob for i in range(1, scored)]
        np.testing.assert_allclose(found, logprobs[np.arange(scored - 1), prompt[1:scored]], rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", SERVED)
def test_chunks_and_batches(name: str, make_case: Any) -> None:
    """Seven requests, three at a time, prompts cut into pieces of at most 8 tokens: the width of most windows here."""
    case = make_case(name)
    requests = jobs(case)
    params = [
        SamplingParams(temperature=0, max_tokens=len(expected), ignore_eos=True, logprobs=0, prompt_logprobs=0)
        for _, expected in requests
    ]
    with LLM(case.folder(), max_num_batched_tokens=8, **SMALL, **QUIET) as llm:
        outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
        check(case, outputs)


@pytest.mark.parametrize("name", ["gemma2", "qwen2_moe"])
def test_live_parameters_in_one_step(name: str, make_case: Any) -> None:
    """The same from a parameter tree, all prompts in one step."""
    case = make_case(name)
    checkpoint = open_checkpoint(case.folder())
    source = {"model_config": checkpoint.model_config, "params": load_params(checkpoint, "float32")}
    params = [
        SamplingParams(temperature=0, max_tokens=len(expected), ignore_eos=True, logprobs=0, prompt_logprobs=0)
        for _, expected in jobs(case)
    ]
    with LLM(**source, max_num_seqs=7, max_num_batched_tokens=128, enforce_eager=True) as llm:
        check(case, llm.generate([prompt for prompt, _ in jobs(case)], params, use_tqdm=False))
