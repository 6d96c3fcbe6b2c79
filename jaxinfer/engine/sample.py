"""A sample: one of the `n` generated sequences of a prompt, from token ids to a CompletionOutput."""

from jaxinfer.engine.logprobs import token_logprobs
from jaxinfer.engine.outputs import CompletionOutput, TokenLogprobs
from jaxinfer.engine.plan import RowLogprobs
from jaxinfer.engine.request import Request
from jaxinfer.engine.sampling_params import RequestOutputKind
from jaxinfer.engine.version_runs import VersionRuns
from jaxinfer.tokenizers.detokenizer import Detokenizer
from jaxinfer.tokenizers.tokenizer import Tokenizer


class Sample:
    """Text and log-probabilities of one sample. Text that nobody reads before the end is made at the end.

    Args:
        request: the sample's request; the scheduler appends its tokens before `append` is called.
        tokenizer: makes the text; None for none at all.
    """

    __slots__ = (
        "_cumulative_logprob",
        "_detokenizer",
        "_interval",
        "_kind",
        "_logprobs",
        "_sent_chars",
        "_sent_end",
        "_sent_tokens",
        "_tokenizer",
        "_versions",
        "is_done",
        "request",
    )

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.request = request
        self.is_done = False
        self._kind = params.output_kind
        self._interval = params.stream_interval or 1
        self._tokenizer = tokenizer if params.detokenize else None
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._cumulative_logprob = None if params.logprobs is None else 0.0
        self._versions = VersionRuns()
        self._sent_tokens = 0
        self._sent_chars = 0
        self._sent_end = False
        needs_text = params.stop or self._kind is not RequestOutputKind.FINAL_ONLY
        self._detokenizer = self._new_detokenizer(self._tokenizer) if self._tokenizer and needs_text else None

    def _new_detokenizer(self, tokenizer: Tokenizer) -> Detokenizer:
        params = self.request.params
        return Detokenizer(
            tokenizer,
            self.request.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def append(self, token_id: int, logprobs: RowLogprobs | None, weight_version: int) -> str | None:
        """Takes the token that the scheduler has just appended to the request, made by these weights.

        Returns:
            The stop text that the token completes, else None.
        """
        self._versions.add(weight_version)
        if self._logprobs is not None and logprobs is not None:
            text = self._tokenizer.token_text if self._tokenizer else None
            entry = token_logprobs(logprobs, 0, token_id, self.request.params.logprobs or 0, text)
            self._logprobs.append(entry)
            self._cumulative_logprob = (self._cumulative_logprob or 0.0) + entry[token_id].logprob
        if self._detokenizer is None or self._ended_by_eos():
            return None
        return self._detokenizer.append(token_id)

    def _ended_by_eos(self) -> bool:
        """The last token is an end-of-sequence id: in the ids, not in the text."""
        return self.request.finish_reason == "stop" and self.request.stop_reason is None

    def is_due(self) -> bool:
        """A stream's next output is due: it is the first token, or `stream_interval` tokens have come since."""
        fresh = len(self.request.output_token_ids) - self._sent_tokens
        return fresh >= self._interval or self._sent_tokens == 0

    def has_news(self) -> bool:
        """No output has carried the latest token or the end of the sample yet."""
        if self.is_done:
            return not self._sent_end
        return self._sent_tokens < len(self.request.output_token_ids) and self.is_due()

    def finish(self) -> None:
        """Completes the text once the request has ended."""
        self.is_done = True
        if self._detokenizer is None and self._tokenizer is not None:
            self._detokenizer = self._new_detokenizer(self._tokenizer)
            ids = self.request.output_token_ids
            for token_id in ids[:-1] if self._ended_by_eos() else ids:
                self._detokenizer.append(token_id)
        if self._detokenizer is not None:
            self._detokenizer.finish()

    def completion(self, index: int) -> CompletionOutput:
        """What the next output holds. Under DELTA every token and character is handed out once."""
        text, end = "", 0
        if self._detokenizer is not None:
            text = self._detokenizer.text
            end = len(text) if self.is_done else self._detokenizer.stable_length
        num_tokens = len(self.request.output_token_ids)
        delta = self._kind is RequestOutputKind.DELTA
        first_char, first_token = (self._sent_chars, self._sent_tokens) if delta else (0, 0)
        self._sent_chars, self._sent_tokens, self._sent_end = end, num_tokens, self.is_done
        return CompletionOutput(
            index=index,
            text=text[first_char:end],
            token_ids=self.request.output_token_ids[first_token:],
            cumulative_logprob=self._cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs[first_token:],
            finish_reason=self.request.finish_reason if self.is_done else None,
            stop_reason=self.request.stop_reason if self.is_done else None,
            weight_versions=self._versions.between(first_token, num_tokens),
        )
