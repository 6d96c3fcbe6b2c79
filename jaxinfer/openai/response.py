"""Response bodies of /v1/chat/completions and /v1/completions, with the fields that vLLM adds to OpenAI's."""

from collections.abc import Sequence
from typing import Any

from jaxinfer.engine.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from jaxinfer.openai.request import CHAT, ApiRequest


def response_body(
    request: ApiRequest, outputs: Sequence[RequestOutput], *, body_id: str, created: int, model: str
) -> dict[str, Any]:
    """The body that answers a request, ready for JSON.

    Args:
        outputs: the finished output of each of the request's prompts, none with an error.
        body_id: without its prefix.
        created: Unix time in seconds.
        model: the served name.
    """
    is_chat = request.url == CHAT
    make = _chat_choice if is_chat else _completion_choice
    choices = [
        {"index": place * request.params.n + sample.index, **make(output, sample, request.params.logprobs)}
        for place, output in enumerate(outputs)
        for sample in output.outputs
    ]
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{body_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": _usage(outputs),
    }
    if is_chat and outputs[0].prompt_logprobs is not None:
        body["prompt_logprobs"] = _prompt_logprobs(outputs[0])
    return body


def _usage(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    prompt = sum(len(output.prompt_token_ids or ()) for output in outputs)
    completion = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def _chat_choice(output: RequestOutput, sample: CompletionOutput, num_logprobs: int | None) -> dict[str, Any]:
    logprobs = None
    if sample.logprobs is not None and num_logprobs is not None:
        entries = [
            {
                **_chat_logprob(candidates[token]),
                "top_logprobs": [_chat_logprob(one) for one in _best(candidates, num_logprobs)],
            }
            for token, candidates in zip(sample.token_ids, sample.logprobs, strict=True)
        ]
        logprobs = {"content": entries}
    return {
        "message": {"role": "assistant", "content": sample.text},
        "logprobs": logprobs,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }


def _chat_logprob(entry: Logprob) -> dict[str, Any]:
    token = entry.decoded_token or ""
    return {"token": token, "logprob": entry.logprob, "bytes": list(token.encode("utf-8", "replace"))}


def _completion_choice(output: RequestOutput, sample: CompletionOutput, num_logprobs: int | None) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "text": sample.text,
        "logprobs": None if sample.logprobs is None else _completion_logprobs(sample.token_ids, sample.logprobs),
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if output.prompt_logprobs is not None:
        choice["prompt_logprobs"] = _prompt_logprobs(output)
    return choice


def _completion_logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Four lists with an entry for each token; of candidates with the same text the most likely one is kept."""
    tokens, offsets, offset = [], [], 0
    alternatives: list[dict[str, float]] = []
    for token, candidates in zip(token_ids, logprobs, strict=True):
        text = candidates[token].decoded_token or ""
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        best: dict[str, float] = {}
        for entry in sorted(candidates.values(), key=lambda entry: -entry.logprob):
            best.setdefault(entry.decoded_token or "", entry.logprob)
        alternatives.append(best)
    return {
        "text_offset": offsets,
        "token_logprobs": [one[token].logprob for token, one in zip(token_ids, logprobs, strict=True)],
        "tokens": tokens,
        "top_logprobs": alternatives,
    }


def _best(candidates: TokenLogprobs, count: int) -> list[Logprob]:
    """The `count` most likely candidates (-1: all), most likely first. The sampled one need not be among them."""
    ordered = sorted(candidates.values(), key=lambda entry: -entry.logprob)
    return ordered if count < 0 else ordered[:count]


def _prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None]:
    """By token id as text, the first entry null, as in vLLM."""
    return [
        None
        if candidates is None
        else {
            str(token): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.decoded_token}
            for token, entry in candidates.items()
        }
        for candidates in output.prompt_logprobs or ()
    ]
