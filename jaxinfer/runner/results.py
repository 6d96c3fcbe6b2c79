"""From the packed array a step brings back to one RowResult a row."""

from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import jax
import numpy as np

from jaxinfer.engine.plan import RowLogprobs, RowResult, ScheduledRow
from jaxinfer.runner.step import SAMPLER_FIELDS


class StepArrays(NamedTuple):
    """A step's outputs on the device.

    Attributes:
        packed: int32[fields, R], see `StepOutput.packed`.
        logits: float32[R, V], or None without the sampler.
        sampler: which fields `packed` has.
        num_logprobs: k.
    """

    packed: jax.Array
    logits: jax.Array | None
    sampler: bool
    num_logprobs: int


def read_rows(rows: tuple[ScheduledRow, ...], values: np.ndarray, arrays: StepArrays) -> tuple[RowResult, ...]:
    """The results of a plan's rows; `values` is `arrays.packed` on the host."""
    if not arrays.sampler:
        drawn = iter(zip(values[0].tolist(), values[1].tolist(), strict=True))
        results = []
        for row in rows:
            token, finite = next(drawn) if row.samples else (None, 1)
            following = tuple(RowResult(token, bool(flag)) for token, flag in islice(drawn, len(row.draft.token_ids)))
            results.append(RowResult(token, bool(finite), following=following))
        return tuple(results)
    reader = _SamplerReader(values, arrays)
    first, results = 0, []
    for row in rows:
        results.append(reader.row(row, first))
        first += row.num_logits
    return tuple(results)


class _SamplerReader:
    """Reads the fields of `SAMPLER_FIELDS` and the alternatives behind them."""

    def __init__(self, values: np.ndarray, arrays: StepArrays) -> None:
        self._fields = dict(zip(SAMPLER_FIELDS, values, strict=False))
        # Lists: reading numpy element by element takes longer than the rest of a step's bookkeeping.
        self._tokens, self._finite, self._allowed = (self._fields[name].tolist() for name in SAMPLER_FIELDS[:3])
        k = arrays.num_logprobs
        self._top_ids = values[len(SAMPLER_FIELDS) : len(SAMPLER_FIELDS) + k]
        self._top_logprobs = values[len(SAMPLER_FIELDS) + k :].view(np.float32)
        self._logits = arrays.logits
        self._num_logprobs = k

    def row(self, row: ScheduledRow, first: int) -> RowResult:
        """The result of a row whose logits rows start at `first`: scored positions, then the draw."""
        params = row.request.params
        last = first + row.num_scored
        scored = self._logprobs(first, last, params.prompt_logprobs) if row.num_scored else None
        finite = all(self._finite[first : last + row.samples])
        if not row.samples:
            return RowResult(None, finite, None, scored)
        end = first + row.num_logits
        following = tuple(self._draw(index, params.logprobs) for index in range(last + 1, end))
        return replace(self._draw(last, params.logprobs), finite=finite, prompt_logprobs=scored, following=following)

    def _draw(self, index: int, count: int | None) -> RowResult:
        """What logits row `index` drew, with `count` alternatives; None for no log-probabilities at all."""
        logprobs = None if count is None else self._logprobs(index, index + 1, count)
        return RowResult(self._tokens[index], bool(self._finite[index]), logprobs, None, bool(self._allowed[index]))

    def _logprobs(self, first: int, last: int, count: int | None) -> RowLogprobs:
        """Logits rows ``first .. last - 1`` with `count` alternatives; -1 asks for the whole vocabulary."""
        count = 0 if count is None else count
        if 0 <= count <= self._num_logprobs:
            ids, logprobs = self._top_ids[:count, first:last].T, self._top_logprobs[:count, first:last].T
        else:
            ids, logprobs = self._from_logits(first, last, None if count < 0 else count)
        fields = self._fields
        target = fields["target_logprobs"][first:last].view(np.float32)
        return RowLogprobs(ids, logprobs, target, fields["target_ranks"][first:last])

    def _from_logits(self, first: int, last: int, count: int | None) -> tuple[np.ndarray, np.ndarray]:
        """The `count` best ids (None: all) from the logits that stayed on the device: a copy of its own."""
        logits = np.asarray(self._logits)[first:last]
        normalizers = self._fields["log_normalizers"][first:last].view(np.float32)
        logprobs = logits - normalizers[:, None]
        ids = np.stack([_best(row, logprobs.shape[1] if count is None else count) for row in logprobs])
        return ids, np.take_along_axis(logprobs, ids, axis=1)


def _best(values: np.ndarray, count: int) -> np.ndarray:
    """int32[count], the places of the largest of `values[V]`, the largest first and the first of equals first."""
    places = np.arange(len(values), dtype=np.int32)
    if count < len(values) and not np.isnan(values).any():
        places = np.flatnonzero(values >= np.partition(values, -count)[-count]).astype(np.int32)
    return places[np.argsort(-values[places], kind="stable")[:count]]
