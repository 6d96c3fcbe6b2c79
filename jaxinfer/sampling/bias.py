"""The dense rows of a request's slot, made on the host: what is added to its logits, and its token counts.

A bias row holds logit_bias, and -inf for everything outside allowed_token_ids, for bad words and for the ids that may
not end the request yet (min_tokens). It is uploaded once and again only when `bias_key` changes.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxinfer.engine.draft import Draft
from jaxinfer.engine.request import Request
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.sampling.state import IN_PROMPT

BiasKey = tuple[bool, tuple[int, ...]]
"""(ids that end the request are banned, ids that would complete a bad word now)."""


def has_static_bias(params: SamplingParams) -> bool:
    """Some part of the bias holds for the whole life of the request."""
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or any(len(word) == 1 for word in params.bad_words_token_ids)
    )


def has_changing_bias(params: SamplingParams) -> bool:
    """Some part of the bias comes and goes with the output."""
    return params.min_tokens > 0 or any(len(word) > 1 for word in params.bad_words_token_ids)


def bias_key(request: Request, position: int, guessed: Sequence[int] = ()) -> BiasKey | None:
    """What the bias of the token to be drawn at `position` depends on besides the request; None when it is zero.

    Args:
        request: the request.
        position: of the token, behind the committed ones and those `guessed` to follow them.
        guessed: taken as if they had been drawn.

    Raises:
        ValueError: a bad word of several tokens needs an output token that has not been committed.
    """
    num_drawn = position - request.num_prompt_tokens
    ends_banned = num_drawn < request.params.min_tokens
    completing = _completing_ids(request, num_drawn, guessed)
    if not (ends_banned or completing or has_static_bias(request.params)):
        return None
    return ends_banned, completing


def bias_row(request: Request, key: BiasKey, vocab_size: int) -> np.ndarray:
    """float32[V], added to the logits of the request's draws while `bias_key` is `key`."""
    params = request.params
    ends_banned, completing = key
    row = np.zeros(vocab_size, np.float32)
    if params.allowed_token_ids is not None:
        row.fill(-np.inf)
        row[_known_ids(params.allowed_token_ids, vocab_size)] = 0.0
    for token_id, bias in (params.logit_bias or {}).items():
        row[token_id] += bias
    row[_known_ids((word[0] for word in params.bad_words_token_ids if len(word) == 1), vocab_size)] = -np.inf
    row[_known_ids(completing, vocab_size)] = -np.inf
    if ends_banned:
        row[_known_ids(request.eos_token_ids.union(params.stop_token_ids), vocab_size)] = -np.inf
    return row


def has_penalties(params: SamplingParams) -> bool:
    """The request needs token counts."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def counts_row(request: Request, vocab_size: int) -> np.ndarray:
    """int32[V]: how often each id is in the committed output, plus IN_PROMPT for the ids of the prompt."""
    counts = np.bincount(np.asarray(request.output_token_ids, np.int64), minlength=vocab_size).astype(np.int32)
    counts[np.unique(np.asarray(request.prompt_token_ids, np.int64))] += IN_PROMPT
    return counts


def under_one_bias(request: Request, draft: Draft) -> Sequence[int]:
    """The tokens of a draft that may stay, ascending, so that the draws after its root and after each of them need one
    bias row at most: a slot has one on the device. It changes where `min_tokens` is reached or a bad word has begun;
    with a token go those behind it."""
    everything = range(len(draft.token_ids))
    if not has_changing_bias(request.params):
        return everything
    known, used = request.num_known_tokens, bias_key(request, request.num_known_tokens)
    kept: list[int] = []
    stay = {-1}
    for index in everything:
        if draft.parent(index) not in stay:
            continue
        guessed = draft.guessed(index)
        key = bias_key(request, known + len(guessed), guessed)
        if key is None or used is None or key == used:
            used = key if used is None else used
            kept.append(index)
            stay.add(index)
    return kept


def _completing_ids(request: Request, num_drawn: int, guessed: Sequence[int]) -> tuple[int, ...]:
    """Last ids of the bad words of several tokens whose other ids are the tail of the first `num_drawn` output ids."""
    words = [word for word in request.params.bad_words_token_ids if len(word) > 1]
    if not words:
        return ()
    output = [*request.output_token_ids, *guessed] if guessed else request.output_token_ids
    if num_drawn > len(output):
        raise ValueError(
            f"request {request.request_id}: bad_words of several tokens need all {num_drawn} output ids, but only "
            f"{len(output)} are committed; commit the step in flight first"
        )
    found = set()
    for word in words:
        start = num_drawn - (len(word) - 1)
        if start >= 0 and tuple(output[start:num_drawn]) == word[:-1]:
            found.add(word[-1])
    return tuple(sorted(found))


def _known_ids(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    """Those the model has logits for: a tokenizer may know more ids."""
    return [token_id for token_id in token_ids if 0 <= token_id < vocab_size]
