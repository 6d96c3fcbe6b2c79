"""What a beam search returns, with vLLM's field names."""

from dataclasses import dataclass
from typing import Any

from jaxinfer.engine.outputs import RequestOutput, TokenLogprobs
from jaxinfer.tokenizers.tokenizer import Tokenizer


@dataclass(slots=True)
class BeamSearchSequence:
    """One of the sequences of a beam search.

    Attributes:
        tokens: the prompt's ids and the generated ones; the id that ended it only under `include_stop_str_in_output`.
        logprobs: for each generated token, the end among them, the candidates that it was chosen from, itself first.
        cum_logprob: sum of the generated tokens' log-probabilities, the end among them.
        text: all of `tokens` as text, special tokens written out; None without a tokenizer.
        finish_reason: "stop" for one that ended by itself, "length" for one that `max_tokens`, the model's length or
            the KV cache cut off, "abort" or "error" when the search did not get to its end.
        stop_reason: None.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    lora_request: Any = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The result of one prompt.

    Attributes:
        sequences: `beam_width` sequences, best first (by `cum_logprob` over the generated length to the power of
            `length_penalty`); fewer only where the vocabulary is smaller than the beams, or with `error`.
        error: why the prompt was not served, None when it was.
    """

    sequences: list[BeamSearchSequence]
    error: str | None = None


def beam_search_output(output: RequestOutput, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """The result of a prompt from the engine's output for it."""
    prompt = list(output.prompt_token_ids or ())
    sequences = []
    for sample in output.outputs:
        if output.error is not None and not sample.token_ids:
            continue
        tokens = prompt + sample.token_ids
        sequences.append(
            BeamSearchSequence(
                tokens=tokens,
                logprobs=sample.logprobs or [],
                cum_logprob=sample.cumulative_logprob or 0.0,
                text=None if tokenizer is None else tokenizer.decode(tokens),
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
            )
        )
    return BeamSearchOutput(sequences, output.error)
