"""What a request returns, with vLLM's field names."""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jaxinfer.engine.speculation_stats import SpeculationStats


@dataclass(slots=True)
class Logprob:
    """One candidate for one position.

    Attributes:
        logprob: log-softmax of the raw model logits; finite and at most 0.
        rank: 1 for the most likely token of the vocabulary.
        decoded_token: the token's own text (U+FFFD for bytes that are no text by themselves), None without text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs: TypeAlias = dict[int, Logprob]
"""The candidates of one position by token id; the token that is there comes first."""


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds on the engine's clock; None while they have not.

    Attributes:
        arrival_time: it was added.
        first_scheduled_time: its first step was dispatched.
        first_token_time: its first token reached the host.
        last_token_time: its latest token reached the host.
        finished_time: it ended.
        num_cached_tokens: prompt tokens whose keys and values were in the cache when they were to be computed for the
            first time; of several samples, those of the first.
        num_generation_tokens: tokens generated, over all `n` samples.
        speculation: what was guessed for it and what came of it; None when nothing was.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    speculation: SpeculationStats | None = None

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` samples of a request.

    Attributes:
        index: 0 to n - 1.
        text: generated text; under DELTA only what is new since the previous output.
        token_ids: generated ids, the one that ended the sample included; under DELTA the new ones.
        cumulative_logprob: sum over all ids generated so far, None without `logprobs`.
        logprobs: one entry for each of `token_ids`, None when not asked for.
        finish_reason: "stop", "length", "abort", "error", or None while it runs.
        stop_reason: the stop text or stop token id that ended it, None for an end-of-sequence id.
        weight_versions: which weights made `token_ids`, as runs ``(version, number of tokens)`` in their order; see
            `LLM.weight_version`. Of a beam search, those that made the last beam of each round.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    routed_experts: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    kv_transfer_params: Any = None
    weight_versions: list[tuple[int, int]] = field(default_factory=list)

    def finished(self) -> bool:
        return self.finish_reason is not None

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(index={self.index}, text={self.text!r}, token_ids={self.token_ids}, "
            f"cumulative_logprob={self.cumulative_logprob}, logprobs={self.logprobs}, "
            f"finish_reason={self.finish_reason}, stop_reason={self.stop_reason})"
        )


@dataclass(slots=True)
class RequestOutput:
    """What a request has produced.

    Attributes:
        request_id: as given when the request was added.
        prompt: its text, None when ids were given.
        prompt_token_ids: its ids.
        prompt_logprobs: one entry for each prompt id, the first None; None when not asked for or not complete yet.
            Under DELTA one output carries it, the first that can.
        outputs: the samples by index; under DELTA those with news.
        finished: every sample has ended.
        metrics: times of the request, the same object in all its outputs.
        num_cached_tokens: prompt tokens that the prefix cache had.
        error: why the request, or one of its samples, ended with finish_reason "error".

    `lora_request`, `encoder_prompt`, `encoder_prompt_token_ids` and `kv_transfer_params` are None, as are
    `routed_experts`, `lora_request` and `kv_transfer_params` of a sample: they belong to features that are not built.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: Any = None
    error: str | None = None

    def __repr__(self) -> str:
        error = "" if self.error is None else f", error={self.error!r}"
        return (
            f"RequestOutput(request_id={self.request_id!r}, prompt={self.prompt!r}, "
            f"prompt_token_ids={self.prompt_token_ids}, prompt_logprobs={self.prompt_logprobs}, "
            f"outputs={self.outputs}, finished={self.finished}, metrics={self.metrics}, "
            f"num_cached_tokens={self.num_cached_tokens}{error})"
        )
