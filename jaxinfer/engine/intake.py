"""The intake: turns what a caller asks for into Requests, or says by name what is wrong with it."""

import operator
import random
from collections.abc import Sequence
from dataclasses import replace

from jaxinfer.config import EngineConfig
from jaxinfer.engine.beam_search_params import BeamSearchParams
from jaxinfer.engine.request import Request, Scoring
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.tokenizers.tokenizer import Tokenizer


class Intake:
    """Checks prompts and parameters against the engine's limits and makes the `n` requests of a prompt.

    Args:
        config: the limits.
        tokenizer: for bad words; None refuses what needs one.
        eos_token_ids: ids that end a sequence; ids outside the vocabulary can never appear and are left out.
        seeds: requests without a seed get theirs from here.
    """

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer | None, eos_token_ids: frozenset[int], seeds: random.Random
    ) -> None:
        self._config = config
        self._vocab_size = config.model.vocab_size
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < self._vocab_size)
        self._seeds = seeds

    def requests(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | BeamSearchParams,
        *,
        priority: int,
        arrival_time: float,
        cache_salt: str | None = None,
    ) -> list[Request]:
        """The requests of one prompt, one for each of the `n` samples; for a beam search the one that it begins with.

        Raises:
            ValueError: the prompt is empty, too long for the model, or has ids outside the vocabulary; a
                parameter does not fit the model; `priority` is given although nothing looks at it; `cache_salt`
                is empty.
            TypeError: something has the wrong type.
        """
        if isinstance(params, BeamSearchParams):
            draws = SamplingParams(temperature=0, max_tokens=params.max_tokens, logprobs=0, detokenize=False)
            (request,) = self.requests(
                request_id,
                prompt_token_ids,
                draws,
                priority=priority,
                arrival_time=arrival_time,
                cache_salt=cache_salt,
            )
            return [self._for_beams(request, params)]
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
        prompt = self._check_prompt(prompt_token_ids)
        self._check_priority(priority)
        _check_salt(cache_salt)
        eos_token_ids = frozenset() if params.ignore_eos else self._eos_token_ids
        params = self._check_params(params, eos_token_ids)
        longest = self._config.scheduler.max_model_len
        wanted = longest if params.max_tokens is None else len(prompt) + params.max_tokens
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        # The prompt is the same for all samples, so the first one scores it.
        others = params if params.prompt_logprobs is None else replace(params, prompt_logprobs=None)
        return [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}/{index}",
                prompt_token_ids=prompt,
                params=params if index == 0 else others,
                arrival_time=arrival_time,
                max_total_tokens=min(wanted, longest),
                eos_token_ids=eos_token_ids,
                seed=seed,
                child_index=index,
                priority=priority,
                cache_salt=cache_salt,
            )
            for index in range(params.n)
        ]

    def beam_end_ids(self, params: BeamSearchParams) -> frozenset[int]:
        """The ids that end a beam."""
        return frozenset() if params.ignore_eos else self._eos_token_ids

    def check_scored(self, scoring: Scoring) -> None:
        """Raises ValueError when the last token is none of the vocabulary's; the others are a prompt."""
        if not 0 <= scoring.last_token < self._vocab_size:
            raise ValueError(
                f"token_ids holds {scoring.last_token}, outside the vocabulary's ids 0 to {self._vocab_size - 1}"
            )

    def _for_beams(self, request: Request, params: BeamSearchParams) -> Request:
        """Its draws do not matter, but their log-probabilities, of as many ids as the search needs; max_logprobs is
        about what callers ask for."""
        wanted = params.beam_width + len(self.beam_end_ids(params))
        request.params = replace(request.params, logprobs=min(wanted, self._vocab_size))
        request.eos_token_ids, request.is_synchronous = frozenset(), True
        return request

    def _check_prompt(self, prompt_token_ids: Sequence[int]) -> list[int]:
        try:
            ids = [operator.index(token) for token in prompt_token_ids]
        except TypeError as error:
            raise TypeError(f"prompt_token_ids must be a list of ints: {error}") from None
        if not ids:
            raise ValueError("prompt_token_ids is empty; give at least one token (a BOS token, say)")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            bad = next(token for token in ids if not 0 <= token < self._vocab_size)
            raise ValueError(f"prompt_token_ids holds {bad}, outside the vocabulary's ids 0 to {self._vocab_size - 1}")
        longest = self._config.scheduler.max_model_len
        if len(ids) >= longest:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, but max_model_len={longest} must hold it and at least one "
                "generated token; shorten the prompt or raise max_model_len"
            )
        return ids

    def _check_priority(self, priority: int) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"priority={priority!r} must be an int")
        if priority != 0 and self._config.scheduler.policy != "priority":
            raise ValueError(f"priority={priority} has no effect unless the engine has scheduling_policy='priority'")

    def _check_params(self, params: SamplingParams, eos_token_ids: frozenset[int]) -> SamplingParams:
        params = params.clone()
        if self._tokenizer is None and (params.stop or params.bad_words):
            name = "stop" if params.stop else "bad_words"
            raise ValueError(f"{name}={getattr(params, name)!r} needs a tokenizer, and this engine has none")
        if self._tokenizer is not None and params.bad_words and not params.bad_words_token_ids:
            params = params.with_bad_words(self._tokenizer)
        params.check_model(self._vocab_size, self._config.runner.max_logprobs, eos_token_ids)
        return params


def _check_salt(cache_salt: str | None) -> None:
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise TypeError(f"cache_salt={cache_salt!r} must be a str or None")
    if cache_salt == "":
        raise ValueError("cache_salt='' keeps nobody apart; give a non-empty str, or None to share with all")
