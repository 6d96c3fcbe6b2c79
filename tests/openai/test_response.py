"""Response bodies, checked against bodies written by hand."""

from jaxinfer.engine.outputs import CompletionOutput, Logprob, RequestOutput
from jaxinfer.openai.request import CHAT, COMPLETIONS, RequestReader
from jaxinfer.openai.response import response_body

NAMED = {"body_id": "1", "created": 1700000000, "model": "tiny"}
FIRST = {104: Logprob(-1.5, 3, "h"), 97: Logprob(-0.25, 1, "a"), 98: Logprob(-1.0, 2, "b")}  # the sampled one first
SECOND = {195: Logprob(-0.5, 1, "\ufffd"), 196: Logprob(-2.0, 2, "\ufffd")}


def test_a_chat(reader: RequestReader) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}
    request = reader.read(CHAT, body)
    sample = CompletionOutput(0, "h", [104, 195], -2.0, [FIRST, SECOND], finish_reason="stop", stop_reason="x")
    prompt = [None, {7: Logprob(-0.5, 2, "p")}]
    output = RequestOutput("r", "..", [1, 2], prompt, [sample], True)
    a, b = {"token": "a", "logprob": -0.25, "bytes": [97]}, {"token": "b", "logprob": -1.0, "bytes": [98]}
    broken = {"token": "\ufffd", "bytes": [239, 191, 189]}
    top = [{**broken, "logprob": -0.5}, {**broken, "logprob": -2.0}]
    assert response_body(request, [output], **NAMED) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "h"},
                "logprobs": {
                    "content": [
                        {"token": "h", "logprob": -1.5, "bytes": [104], "top_logprobs": [a, b]},
                        {**top[0], "top_logprobs": top},
                    ]
                },
                "finish_reason": "stop",
                "stop_reason": "x",
            }
        ],
        "usage": {"prompt_tokens": 2, "total_tokens": 4, "completion_tokens": 2},
        "prompt_logprobs": [None, {"7": {"logprob": -0.5, "rank": 2, "decoded_token": "p"}}],
    }


def test_completions_of_two_prompts(reader: RequestReader) -> None:
    request = reader.read(COMPLETIONS, {"prompt": ["x", "yz"], "n": 2, "logprobs": 2})
    samples = [
        CompletionOutput(0, "ha", [104, 195], -2.0, [FIRST, SECOND], finish_reason="length"),
        CompletionOutput(1, "", [], 0.0, [], finish_reason="stop"),
    ]
    outputs = [RequestOutput("0", "x", [1], None, samples, True), RequestOutput("1", "yz", [1, 2], None, samples, True)]
    body = response_body(request, outputs, **NAMED)
    assert body["id"] == "cmpl-1" and body["object"] == "text_completion"
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["choices"][2] == {
        "index": 2,
        "text": "ha",
        "logprobs": {
            "text_offset": [0, 1],
            "token_logprobs": [-1.5, -0.5],
            "tokens": ["h", "\ufffd"],
            "top_logprobs": [{"a": -0.25, "b": -1.0, "h": -1.5}, {"\ufffd": -0.5}],
        },
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert body["usage"] == {"prompt_tokens": 3, "total_tokens": 7, "completion_tokens": 4}
