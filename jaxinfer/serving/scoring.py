"""Scoring: log-probabilities of tokens that are given, as requests whose draws are thrown away."""

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.replicas import AnyEngine
from jaxinfer.engine.request import Scoring
from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams
from jaxinfer.serving.inputs import TokenizedPrompt
from jaxinfer.serving.request_loop import RequestLoop


@dataclass(frozen=True)
class ScoredSequence:
    """A sequence and which of its tokens are scored.

    The engine is given all tokens but the last, whose log-probability is that of a draw: so a sequence may be as long
    as `max_model_len`.

    Attributes:
        token_ids: at least one.
        start: index of the first token that is scored, from 1 to their number.
        temperature: the logits are divided by it.
    """

    token_ids: list[int]
    start: int
    temperature: float

    @property
    def is_empty(self) -> bool:
        """No token is scored."""
        return self.start >= len(self.token_ids)

    @property
    def prompt(self) -> TokenizedPrompt:
        return TokenizedPrompt(self.token_ids[:-1])

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=0,
            max_tokens=1,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            prompt_logprobs=0 if self.start < len(self.token_ids) - 1 else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.start, self.temperature, self.token_ids[-1])

    def logprobs(self, output: RequestOutput | None) -> np.ndarray:
        """float32[len(token_ids) - start] from the finished output; None for an empty sequence."""
        if output is None:
            return np.zeros((0,), np.float32)
        if output.error is not None:
            raise ValueError(f"a sequence could not be scored: {output.error}")
        entries = [*(output.prompt_logprobs or ())[self.start :], *(output.outputs[0].logprobs or ())]
        return np.array([next(iter(entry.values())).logprob for entry in entries if entry], np.float32)


def scored_sequences(token_ids: Any, start: int | Sequence[int], temperature: float) -> list[ScoredSequence]:
    """The checked arguments of `LLM.compute_logprobs`.

    Raises:
        ValueError: an empty sequence, or a start or temperature out of range.
        TypeError: something has the wrong type.
    """
    if isinstance(temperature, bool) or not isinstance(temperature, Real):
        raise TypeError(f"temperature={temperature!r} must be a number")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be above 0 and finite: the logits are divided by it")
    sequences = _list_of(token_ids, "token_ids", "a list of sequences of ids")
    if isinstance(start, Integral):
        starts = [start] * len(sequences)
    else:
        starts = _list_of(start, "start", "an int, or a list of one for each sequence")
    if len(starts) != len(sequences):
        raise ValueError(
            f"start has {len(starts)} entries for {len(sequences)} sequences; give one for each, or an int"
        )
    found = []
    for place, (sequence, first) in enumerate(zip(sequences, starts, strict=True)):
        try:
            ids = [operator.index(token) for token in sequence]
        except TypeError as error:
            advice = "; a single sequence is a list, too: [[1, 2, 3]]" if isinstance(sequence, Integral) else ""
            raise TypeError(f"token_ids[{place}] must be a list of ints: {error}{advice}") from None
        if isinstance(first, bool) or not isinstance(first, Integral):
            raise TypeError(f"start={first!r} of token_ids[{place}] must be an int")
        if not ids:
            raise ValueError(f"token_ids[{place}] is empty; give at least one token")
        if not 1 <= first <= len(ids):
            raise ValueError(f"start={first} of token_ids[{place}] must be from 1 to its {len(ids)} tokens")
        found.append(ScoredSequence(ids, operator.index(first), float(temperature)))
    return found


def _list_of(values: Any, name: str, kind: str) -> list[Any]:
    """The values of an iterable that is no text."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{name}={values!r} must be {kind}")
    return list(values)


def score(engine: AnyEngine, sequences: Sequence[ScoredSequence], counter: Iterator[int]) -> list[np.ndarray]:
    """The log-probabilities of each sequence, in their order, all computed together.

    Args:
        engine: nobody else steps it meanwhile.
        sequences: what to score.
        counter: makes the request ids.
    """
    outputs: dict[str, RequestOutput] = {}
    ids = [str(next(counter)) for _ in sequences]
    with RequestLoop(engine) as loop:
        for request_id, sequence in zip(ids, sequences, strict=True):
            if not sequence.is_empty:
                loop.add(request_id, sequence.prompt, sequence.params, scoring=sequence.scoring)
        while len(loop):
            outputs |= {output.request_id: output for output in loop.step()}
    return [sequence.logprobs(outputs.get(request_id)) for request_id, sequence in zip(ids, sequences, strict=True)]
