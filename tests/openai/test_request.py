"""Request bodies: what each field becomes, and which are refused."""

from typing import Any

import pytest

from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams
from jaxinfer.openai.request import CHAT, COMPLETIONS, RequestReader

MESSAGES = [{"role": "user", "content": "hi"}]
FINAL = RequestOutputKind.FINAL_ONLY


def test_a_completion(reader: RequestReader) -> None:
    request = reader.read(COMPLETIONS, {"model": "tiny", "prompt": "ab"})
    assert [prompt.token_ids for prompt in request.prompts] == [[97, 98]]
    assert request.params == SamplingParams(top_k=7, max_tokens=16, output_kind=FINAL)


def test_a_chat(reader: RequestReader) -> None:
    request = reader.read(CHAT, {"messages": MESSAGES, "top_k": -1})
    assert [prompt.text for prompt in request.prompts] == ["<user>hi#"]
    assert request.params == SamplingParams(top_k=0, max_tokens=None, output_kind=FINAL)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [("a", [[97]]), (["a", "bc"], [[97], [98, 99]]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_forms_of_a_prompt(reader: RequestReader, prompt: Any, ids: list[list[int]]) -> None:
    assert [item.token_ids for item in reader.read(COMPLETIONS, {"prompt": prompt}).prompts] == ids


@pytest.mark.parametrize(("url", "body"), [(CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": ["a", "bc"]})])
def test_a_salt_goes_with_every_prompt(reader: RequestReader, url: str, body: dict[str, Any]) -> None:
    assert {prompt.cache_salt for prompt in reader.read(url, body).prompts} == {None}
    assert {prompt.cache_salt for prompt in reader.read(url, body | {"cache_salt": "s"}).prompts} == {"s"}


def test_sampling_fields(reader: RequestReader) -> None:
    fields = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 2,
        "seed": 11,
        "stop": ["x", "y"],
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "logprobs": 3,
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [5],
        "allowed_token_ids": [6, 7],
        "bad_words": ["w"],
        "prompt_logprobs": 1,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    params = reader.read(COMPLETIONS, {"prompt": "a", **fields}).params
    assert {name: getattr(params, name) for name in fields} == fields
    biased = reader.read(COMPLETIONS, {"prompt": "a", "logit_bias": {"5": -(10**400), "6": 1}}).params
    assert biased.logit_bias == {5: -100.0, 6: 1.0}


def test_null_counts_as_left_out(reader: RequestReader) -> None:
    body = dict.fromkeys(["temperature", "stop", "seed", "top_k", "suffix", "stream_options", "logprobs", "model"])
    assert reader.read(COMPLETIONS, {"prompt": "a", **body}) == reader.read(COMPLETIONS, {"prompt": "a"})


def test_fields_that_ask_for_nothing(reader: RequestReader) -> None:
    body = {"stream": False, "best_of": 1, "echo": False, "user": "me", "metadata": {"a": "b"}}
    assert reader.read(COMPLETIONS, {"prompt": "a", **body}) == reader.read(COMPLETIONS, {"prompt": "a"})
    body = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
    assert reader.read(CHAT, {"messages": MESSAGES, **body}) == reader.read(CHAT, {"messages": MESSAGES})


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)],
)
def test_logprobs_of_a_chat(reader: RequestReader, fields: dict[str, Any], logprobs: int | None) -> None:
    assert reader.read(CHAT, {"messages": MESSAGES, **fields}).params.logprobs == logprobs


@pytest.mark.parametrize(
    ("fields", "length"),
    [({"max_tokens": 5}, 5), ({"max_completion_tokens": 6}, 6), ({"max_completion_tokens": 6, "max_tokens": 6}, 6)],
)
def test_length_of_a_chat(reader: RequestReader, fields: dict[str, Any], length: int) -> None:
    assert reader.read(CHAT, {"messages": MESSAGES, **fields}).params.max_tokens == length


def test_options_of_the_template(reader: RequestReader) -> None:
    body = {"messages": MESSAGES, "chat_template": "{{ mood }}!", "chat_template_kwargs": {"mood": "glad"}}
    assert reader.read(CHAT, body).prompts[0].text == "glad!"
    answer = [*MESSAGES, {"role": "assistant", "content": "I am"}]
    body = {"messages": answer, "add_generation_prompt": False, "continue_final_message": True}
    assert reader.read(CHAT, body).prompts[0].text == "<user>hi<assistant>I am"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 3}, "3"),
        ({"prompt": "a", "max_token": 3}, "max_token "),
        ({"prompt": "a", "max_token": None}, "max_token "),
        ({"prompt": "a", "messages": MESSAGES}, "messages"),
        ({"prompt": "a", "stream": True}, "stream=True"),
        ({"prompt": "a", "echo": True}, "echo=True"),
        ({"prompt": "a", "best_of": 2}, "best_of=2"),
        ({"prompt": "a", "model": "other"}, "model='other'"),
        ({"prompt": "a", "temperature": "hot"}, "temperature='hot'"),
        ({"prompt": "a", "temperature": 3}, "temperature=3"),
        ({"prompt": "a", "temperature": 10**400}, "temperature=1000"),
        ({"prompt": "a", "repetition_penalty": 10**400}, "repetition_penalty="),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens=0"),
        ({"prompt": "a", "max_tokens": 2.0}, "max_tokens=2.0"),
        ({"prompt": "a", "logprobs": True}, "logprobs=True"),
    ],
)
def test_refused_completions(reader: RequestReader, body: dict[str, Any], named: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        reader.read(COMPLETIONS, body)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "hi"}]}, "role"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {}}, "guided_json"),
        ({"logprobs": 3}, "logprobs=3"),
        ({"top_logprobs": 3}, "top_logprobs=3"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens=4"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"prompt": "a"}, "prompt"),
    ],
)
def test_refused_chats(reader: RequestReader, fields: dict[str, Any], named: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        reader.read(CHAT, {"messages": MESSAGES, **fields})
    assert named in str(caught.value)
