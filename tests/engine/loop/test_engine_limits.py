"""Length limits and bad requests: field case 20, ids of case 10, contradictions of case 5."""

from collections.abc import Callable
from typing import Any

import pytest

from jaxinfer.engine.sampling_params import SamplingParams


@pytest.mark.parametrize("prompt_length", [1, 62, 63])
@pytest.mark.parametrize("max_tokens", [None, 1, 2, 1000])
def test_output_length_is_exact(make_harness: Callable, prompt_length: int, max_tokens: int | None) -> None:
    harness = make_harness(max_model_len=64)
    final = harness.generate([3] * prompt_length, max_tokens=max_tokens, ignore_eos=True)
    room = 64 - prompt_length
    assert len(final.outputs[0].token_ids) == (room if max_tokens is None else min(max_tokens, room))
    assert final.outputs[0].finish_reason == "length"
    harness.check_idle()


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], ["empty"]),
        ([3] * 64, ["64 tokens", "max_model_len=64"]),
        ([3] * 65, ["65 tokens", "max_model_len=64"]),
        ([3, 64], ["64", "0 to 63"]),
        ([-1], ["-1", "0 to 63"]),
    ],
)
def test_bad_prompt_is_refused_and_others_finish(make_harness: Callable, prompt: list[int], words: list[str]) -> None:
    harness = make_harness(max_model_len=64)
    harness.add("a")
    with pytest.raises(ValueError) as caught:
        harness.add("bad", prompt)
    assert all(word in str(caught.value) for word in words)
    harness.add("b")
    assert set(harness.run()) == {"a", "b"}
    harness.check_idle()


def test_prompt_that_cannot_fit_the_pool_is_refused_with_both_numbers(make_harness: Callable) -> None:
    harness = make_harness(num_blocks=8)  # 7 can be allocated: 112 tokens
    with pytest.raises(ValueError, match="200 tokens needs 13 KV blocks .* has 7"):
        harness.add("bad", [3] * 200)
    final = harness.generate([3] * 112, max_tokens=200)
    assert final.outputs[0].finish_reason == "length" and len(final.outputs[0].token_ids) >= 1
    harness.check_idle()


def test_request_that_fills_the_pool_alone_ends(make_harness: Callable) -> None:
    harness = make_harness(num_blocks=8)
    for name in "abcde":
        harness.add(name, [3] * 100, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    outputs = harness.run()
    for name in "abcde":
        sample = outputs[name][-1].outputs[0]
        assert sample.finish_reason == "length"
        assert 12 <= len(sample.token_ids) <= 13
    harness.check_idle()


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
@pytest.mark.parametrize("token", [64, -1, 10**9])
def test_bad_ids_end_only_their_request(make_harness: Callable, field: str, token: int) -> None:
    harness = make_harness()
    harness.add("good")
    value = {token: 1.0} if field == "logit_bias" else [token]
    with pytest.raises(ValueError, match=f"{field} holds {token}"):
        harness.add("bad", (1,), SamplingParams(temperature=0, min_tokens=1, **{field: value}))
    assert set(harness.run()) == {"good"}


@pytest.mark.parametrize(
    ("kwargs", "error", "word"),
    [
        ({"request_id": 7}, TypeError, "request_id=7"),
        ({"prompt_token_ids": ["x"]}, TypeError, "prompt_token_ids"),
        ({"prompt_token_ids": [1.0]}, TypeError, "prompt_token_ids"),
        ({"params": {"n": 1}}, TypeError, "SamplingParams"),
        ({"priority": 1}, ValueError, "priority=1"),
        ({"priority": "high"}, TypeError, "priority"),
        ({"params": SamplingParams(logprobs=21)}, ValueError, "logprobs=21 .* max_logprobs"),
    ],
)
def test_bad_arguments(make_harness: Callable, kwargs: dict[str, Any], error: type[Exception], word: str) -> None:
    call = {"request_id": "x", "prompt_token_ids": [1], "params": SamplingParams(), **kwargs}
    harness = make_harness()
    with pytest.raises(error, match=word):
        harness.engine.add_request(**call)
    assert not harness.engine.has_unfinished_requests()


def test_changed_parameters_are_checked_again_and_copied(make_harness: Callable) -> None:
    harness = make_harness()
    params = SamplingParams(temperature=0, max_tokens=3)
    params.max_tokens = 0
    with pytest.raises(ValueError, match="max_tokens=0"):
        harness.add("x", (1,), params)
    params.max_tokens = 3
    harness.add("x", (1,), params)
    params.max_tokens = 50
    assert len(harness.run()["x"][-1].outputs[0].token_ids) == 3


def test_request_id_is_unique_among_unfinished_only(make_harness: Callable) -> None:
    harness = make_harness()
    harness.add("x")
    with pytest.raises(ValueError, match="request_id='x' is in use"):
        harness.add("x")
    harness.run()
    harness.add("x")
    assert harness.run()["x"][-1].finished


def test_text_features_need_a_tokenizer(make_harness: Callable) -> None:
    harness = make_harness(tokenizer=None)
    for params in (SamplingParams(stop="x"), SamplingParams(bad_words=["x"])):
        with pytest.raises(ValueError, match="needs a tokenizer"):
            harness.add("x", (1,), params)
    final = harness.generate(logprobs=1)
    assert final.outputs[0].text == "" and len(final.outputs[0].token_ids) == 16
    assert all(entry.decoded_token is None for token in final.outputs[0].logprobs for entry in token.values())
