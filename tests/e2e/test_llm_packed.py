"""Engines on checkpoints that others quantised."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoint import load_params, open_checkpoint
from jaxinfer.quant.array import QuantArray

DATA = Path(__file__).parents[1] / "data/quantised"
GREEDY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=-1)
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 20,
    "enforce_eager": True,
    "use_tqdm_on_load": False,
    "max_logprobs": -1,
    "quantization_config": {"fast_form": False},
}


NAME = "gptq_v2_8bit"  # with act-order


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DATA / NAME, quantization="gptq_marlin", **SETTINGS) as made:
        yield made


def answer(llm: LLM, tokens: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Ids, and log-probabilities of the first one's alternatives."""
    (output,) = llm.generate([{"prompt_token_ids": tokens.tolist()}], GREEDY, use_tqdm=False)
    first = output.outputs[0].logprobs[0]
    return list(output.outputs[0].token_ids), np.array([first[token].logprob for token in range(len(first))])


def test_first_tokens_are_those_of_the_reference_and_weights_come_back(llm: LLM) -> None:
    reference = np.load(DATA / NAME / "reference.npz")
    logits = reference["logits"][-1]
    ids, logprobs = answer(llm, reference["tokens"])
    np.testing.assert_allclose(logprobs, logits - np.log(np.exp(logits.astype(np.float64)).sum()), atol=1e-3)
    assert ids[0] == logits.argmax()
    llm.sleep(level=2)
    llm.wake_up()  # reads the checkpoint again
    assert answer(llm, reference["tokens"])[0] == ids


def test_floats_and_own_parameters_can_be_swapped_in(llm: LLM) -> None:
    checkpoint, tokens = open_checkpoint(DATA / NAME), np.load(DATA / NAME / "reference.npz")["tokens"]
    before = answer(llm, tokens)
    llm.update_params(load_params(checkpoint, "float32"))  # rounded again, in the same format
    quantised = [leaf for leaf in llm._parts.engine.runner._leaves if leaf.dtype in (np.int8, np.uint8)]  # type: ignore[attr-defined]
    assert quantised
    np.testing.assert_allclose(answer(llm, tokens)[1], before[1], atol=0.5)
    is_quantised = lambda leaf: isinstance(leaf, QuantArray)  # noqa: E731
    plan = llm._parts._plan  # type: ignore[attr-defined]
    own = load_params(checkpoint, "float32", plan=plan)
    assert any(map(is_quantised, jax.tree.leaves(own, is_leaf=is_quantised)))
    llm.update_params(own)
    assert answer(llm, tokens)[0] == before[0]


def test_a_method_that_the_checkpoint_does_not_have_is_refused_before_weights_are_read() -> None:
    with pytest.raises(ValueError, match="quantization='awq' .*but .* is quantised as gptq, 4 bits in groups of 32"):
        LLM(DATA / "gptq_v1", quantization="awq", **{**SETTINGS, "quantization_config": None})
