"""logprobs and prompt_logprobs: field case 12."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams

VOCAB_SIZE = 64


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum())


def check_entries(entries: list[dict], context: list[int], ids: list[int], count: int, logits: Any) -> float:
    """Compares with the log-softmax of the raw logits; the sum over the ids is returned."""
    total = 0.0
    assert len(entries) == len(ids)
    for entry, token in zip(entries, ids, strict=True):
        truth = log_softmax(logits(context))
        order = np.argsort(-truth)
        assert next(iter(entry)) == token
        expected = {token, *order[: VOCAB_SIZE if count == -1 else count].tolist()}
        assert set(entry) == expected
        for candidate, found in entry.items():
            assert found.logprob == pytest.approx(truth[candidate], abs=1e-5) and found.logprob <= 0
            assert found.rank == 1 + int(np.flatnonzero(order == candidate)[0])
        total += truth[token]
        context = [*context, token]
    return total


@pytest.mark.parametrize("count", [0, 1, 5, 20, -1])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 2.0, "top_k": 3, "seed": 1}])
def test_values_are_those_of_the_raw_model(make_harness: Callable, history: Any, count: int, sampling: dict) -> None:
    final = make_harness().generate([1, 2, 3], logprobs=count, logit_bias={5: 3.0}, **sampling)
    sample = final.outputs[0]
    assert len(sample.token_ids) == 16
    total = check_entries(sample.logprobs, [1, 2, 3], sample.token_ids, count, history)
    assert sample.cumulative_logprob == pytest.approx(total, abs=1e-4)
    if count == 0:
        assert all(len(entry) == 1 for entry in sample.logprobs)
    if count == -1:
        assert all(sum(math.exp(e.logprob) for e in entry.values()) == pytest.approx(1) for entry in sample.logprobs)


def test_none_gives_none(make_harness: Callable) -> None:
    final = make_harness().generate()
    assert final.outputs[0].logprobs is None and final.outputs[0].cumulative_logprob is None
    assert final.prompt_logprobs is None


def test_neighbours_do_not_change_how_many(make_harness: Callable) -> None:
    harness = make_harness()
    for count in (None, 0, 5):
        harness.add(str(count), (1, 2), SamplingParams(temperature=0, logprobs=count))
    last = {name: outputs[-1].outputs[0] for name, outputs in harness.run().items()}
    assert last["None"].logprobs is None
    assert {len(entry) for entry in last["0"].logprobs} == {1}
    assert {len(entry) for entry in last["5"].logprobs} <= {5, 6}


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("ending", [{}, {"stop": "lo"}])
def test_one_entry_for_each_token(make_harness: Callable, script: Callable, kind: Any, ending: dict) -> None:
    harness = make_harness(script(12, 13, 2), eos=(2,))
    harness.add("a", (1,), SamplingParams(temperature=0, logprobs=2, output_kind=kind, **ending))
    outputs = [output.outputs[0] for output in harness.run()["a"]]
    for sample in outputs:
        assert [next(iter(entry)) for entry in sample.logprobs] == sample.token_ids
    num_tokens = 2 if ending else 3
    ids = [token for sample in outputs for token in sample.token_ids]
    assert (ids if kind is RequestOutputKind.DELTA else outputs[-1].token_ids) == [12, 13, 2][:num_tokens]


def test_decoded_tokens_never_raise(make_harness: Callable, script: Callable) -> None:
    final = make_harness(script(16, 17, 18, 12)).generate(logprobs=0, max_tokens=4)
    shown = [next(iter(entry.values())).decoded_token for entry in final.outputs[0].logprobs]
    assert shown == ["\ufffd", "\ufffd", "\ufffd", "hel"] and final.outputs[0].text == "😀hel"


def test_no_text_without_detokenize(make_harness: Callable) -> None:
    final = make_harness().generate(logprobs=1, prompt_logprobs=1, detokenize=False)
    entries = [*final.outputs[0].logprobs, *final.prompt_logprobs[1:]]
    assert final.outputs[0].text == "" and all(e.decoded_token is None for entry in entries for e in entry.values())


@pytest.mark.parametrize("count", [0, 3, -1])
@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 8, "max_num_seqs": 2}])
def test_prompt_logprobs(make_harness: Callable, history: Any, count: int, limits: dict) -> None:
    prompt = [1 + i % 50 for i in range(37)]
    final = make_harness(**limits).generate(prompt, prompt_logprobs=count, max_tokens=2)
    assert final.prompt_logprobs[0] is None and len(final.prompt_logprobs) == len(prompt)
    check_entries(final.prompt_logprobs[1:], prompt[:1], prompt[1:], count, history)


def test_prompt_logprobs_of_one_token(make_harness: Callable) -> None:
    assert make_harness().generate([5], prompt_logprobs=2).prompt_logprobs == [None]


def test_prompt_logprobs_survive_preemption(make_harness: Callable, history: Any) -> None:
    harness = make_harness(num_blocks=9, block_size=8)
    params = SamplingParams(temperature=0, max_tokens=30, prompt_logprobs=1)
    for name in "ab":
        harness.add(name, [3] * 24, params)
    outputs = harness.run()
    assert harness.engine.stats().num_preemptions > 0
    for name in "ab":
        check_entries(outputs[name][-1].prompt_logprobs[1:], [3], [3] * 23, 1, history)


def test_prompt_logprobs_of_many_samples_and_of_a_stream(make_harness: Callable) -> None:
    harness = make_harness()
    params = SamplingParams(n=2, seed=1, max_tokens=3, prompt_logprobs=0, output_kind=RequestOutputKind.DELTA)
    harness.add("a", [1, 2, 3], params)
    outputs = harness.run()["a"]
    assert len(outputs[0].prompt_logprobs) == 3
    assert all(output.prompt_logprobs is None for output in outputs[1:])
    scored = [row for plan in harness.device.plans for row in plan.rows if row.num_scored]
    assert len(scored) == 1, "one sample scores the prompt for all"


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_prompt_logprobs_are_shown_when_complete(make_harness: Callable, history: Any, kind: RequestOutputKind) -> None:
    """The first sample needs many steps for the prompt; the second begins when it has been scored."""
    harness = make_harness(max_num_seqs=4)
    prompt = [1 + i % 50 for i in range(37)]
    harness.add("a", prompt, SamplingParams(n=2, seed=1, max_tokens=20, prompt_logprobs=1, output_kind=kind))
    shown = [output.prompt_logprobs for output in harness.run()["a"]]
    assert shown[0] is not None, "an output came before the prompt was scored"
    (complete, *_) = carried = [entries for entries in shown if entries is not None]
    check_entries(complete[1:], prompt[:1], prompt[1:], 1, history)
    assert len(carried) == 1 if kind is RequestOutputKind.DELTA else all(entries is complete for entries in carried)


def test_scores_that_are_not_finite_are_not_shown(make_harness: Callable) -> None:
    harness = make_harness()
    harness.device.poison.add("only")
    output = harness.generate([1, 2, 3], prompt_logprobs=1)
    assert output.outputs[0].finish_reason == "error" and output.prompt_logprobs is None
