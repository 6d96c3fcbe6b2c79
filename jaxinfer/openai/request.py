"""Request bodies of /v1/chat/completions and /v1/completions: checked, and turned into prompts and SamplingParams."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams
from jaxinfer.serving.inputs import TokenizedPrompt, prompt_list, render_chat, tokenize_prompt
from jaxinfer.tokenizers.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
URLS = (CHAT, COMPLETIONS)

SAMPLING = frozenset(
    (
        *("n", "seed", "stop", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias"),
        *("max_tokens", "logprobs"),
        # Beyond OpenAI's, with vLLM's names:
        *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "allowed_token_ids"),
        *("bad_words", "prompt_logprobs", "include_stop_str_in_output", "skip_special_tokens"),
        "spaces_between_special_tokens",
    )
)
"""Fields that are SamplingParams' own (`logprobs` of a chat apart)."""
TEMPLATE = frozenset(("chat_template", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"))
FIELDS: Mapping[str, frozenset[str]] = {
    CHAT: SAMPLING | TEMPLATE | {"messages", "max_completion_tokens", "top_logprobs", "cache_salt"},
    COMPLETIONS: SAMPLING | {"prompt", "cache_salt"},
}
ASKS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "parallel_tool_calls": (False, True),
    "response_format": ({"type": "text"},),
    "stream": (False,),
    "stream_options": (),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
}
"""Fields that are not built -> values which make no difference (null never does)."""
BOOKKEEPING = frozenset(("metadata", "model", "user"))
COMPLETION_MAX_TOKENS = 16


@dataclass(frozen=True)
class ApiRequest:
    """A request body as the engine takes it.

    Attributes:
        url: one of `URLS`.
        prompts: one for a chat; at least one for a completion.
        params: of every prompt.
    """

    url: str
    prompts: list[TokenizedPrompt]
    params: SamplingParams


class RequestReader:
    """Reads request bodies for one served model.

    Args:
        tokenizer: None where prompts can only be token ids.
        defaults: fields of SamplingParams that the model's generation config sets.
        model_name: what the field `model` has to be where it is given.
        chat_template: in place of the model's own.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        defaults: Mapping[str, Any],
        model_name: str,
        chat_template: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._model_name = model_name
        self._chat_template = chat_template

    def read(self, url: str, body: Mapping[str, Any]) -> ApiRequest:
        """Checks a body.

        Args:
            url: one of `URLS`.
            body: a field that is null counts as left out.

        Raises:
            ValueError, TypeError: a field is unknown, not built, or has a bad value; it is named.
        """
        self._check_fields(url, body)
        given = {name: value for name, value in body.items() if value is not None}
        params = self._sampling_params(url, given)
        prompts = [self._conversation(given)] if url == CHAT else self._prompts(given)
        salt = given.get("cache_salt")
        return ApiRequest(url, [replace(prompt, cache_salt=salt) for prompt in prompts], params)

    def _check_fields(self, url: str, body: Mapping[str, Any]) -> None:
        for name, value in body.items():
            if name in FIELDS[url] or name in BOOKKEEPING:
                continue
            if name not in ASKS_NOTHING:
                raise ValueError(f"{name} is not a field of {url} that jaxinfer knows; remove it")
            if value is not None and value not in ASKS_NOTHING[name]:
                raise ValueError(f"{name}={value!r} is not supported; remove it")
        model = body.get("model")
        if model is not None and model != self._model_name:
            raise ValueError(f"model={model!r} is not served here; it must be {self._model_name!r}, or left out")

    def _sampling_params(self, url: str, given: Mapping[str, Any]) -> SamplingParams:
        values: dict[str, Any] = {"max_tokens": COMPLETION_MAX_TOKENS if url == COMPLETIONS else None}
        values |= self._defaults
        values |= {name: value for name, value in given.items() if name in SAMPLING}
        if url == CHAT:
            values["logprobs"] = _chat_logprobs(given)
            values["max_tokens"] = _chat_max_tokens(given, values["max_tokens"])
        return SamplingParams(**values, output_kind=RequestOutputKind.FINAL_ONLY)

    def _prompts(self, given: Mapping[str, Any]) -> list[TokenizedPrompt]:
        if "prompt" not in given:
            raise ValueError("prompt is missing: give a text, a list of token ids, or a list of those")
        prompts = [tokenize_prompt(prompt, self._tokenizer) for prompt in prompt_list(given["prompt"])]
        if not prompts:
            raise ValueError("prompt=[] holds no prompt; give at least one")
        return prompts

    def _conversation(self, given: Mapping[str, Any]) -> TokenizedPrompt:
        messages = given.get("messages")
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise ValueError(f"messages={messages!r} must be a list of messages with role and content")
        options = {"chat_template": self._chat_template} | {name: given[name] for name in TEMPLATE if name in given}
        variables = options.pop("chat_template_kwargs", None) or {}
        if not isinstance(variables, Mapping):
            raise TypeError(f"chat_template_kwargs={variables!r} must be an object")
        return render_chat(messages, self._tokenizer, **{**variables, **options})


def _chat_logprobs(given: Mapping[str, Any]) -> Any:
    wanted, alternatives = given.get("logprobs", False), given.get("top_logprobs")
    if not isinstance(wanted, bool):
        raise TypeError(f"logprobs={wanted!r} must be true or false; top_logprobs says how many alternatives")
    if not wanted and alternatives:
        raise ValueError(f"top_logprobs={alternatives!r} needs logprobs=true")
    return (alternatives or 0) if wanted else None


def _chat_max_tokens(given: Mapping[str, Any], default: int | None) -> Any:
    old, new = given.get("max_tokens"), given.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise ValueError(f"max_tokens={old!r} contradicts max_completion_tokens={new!r}; give only one of them")
    return new if new is not None else old if old is not None else default
