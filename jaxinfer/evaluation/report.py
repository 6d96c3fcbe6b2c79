"""What an evaluation found."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from jaxinfer.evaluation.scoring import Scores

NUM_WORST = 3
"""Layers that are named."""


@dataclass(frozen=True)
class LayerError:
    """A layer, counted from 0, and the relative error of its attention (`attention_errors`)."""

    layer: int
    attention_error: float


@dataclass(frozen=True)
class Difference:
    """Against the same tokens' scores with an unquantised cache.

    Attributes:
        mean_abs_delta_logprob: mean of the absolute difference of a token's log-probabilities, in nats.
        max_abs_delta_logprob: the largest.
        same_top1: share of places, 0 to 1, at which the same token is the most probable.
        worst_layers: those whose attention suffers most, the worst first.
    """

    mean_abs_delta_logprob: float
    max_abs_delta_logprob: float
    same_top1: float
    worst_layers: tuple[LayerError, ...]

    @classmethod
    def of(cls, scores: Scores, reference: Scores, layer_errors: np.ndarray) -> "Difference":
        """Of scores of the same windows; `layer_errors[layers]`."""
        delta = np.abs(scores.logprobs - reference.logprobs)
        worst = np.argsort(-layer_errors, kind="stable")[:NUM_WORST]
        return cls(
            float(delta.mean()),
            float(delta.max()),
            float((scores.best_ids == reference.best_ids).mean()),
            tuple(LayerError(int(layer), float(layer_errors[layer])) for layer in worst),
        )


@dataclass(frozen=True)
class Result:
    """One way of storing keys and values.

    Attributes:
        kv_cache_dtype: one of `jaxinfer.config.KV_CACHE_DTYPES`.
        perplexity: ``exp(nll)``.
        nll: mean negative log-probability of a token, in nats.
        tokens_per_second: that went through the model, compilation not counted.
        kv_bytes_per_token: keys, values and scales of a token in all layers.
        difference: against the unquantised cache; None for that itself, and where nothing is compared.
    """

    kv_cache_dtype: str
    perplexity: float
    nll: float
    tokens_per_second: float
    kv_bytes_per_token: int
    difference: Difference | None
    HEADER: ClassVar[tuple[str, ...]] = (
        "KV cache",
        "perplexity",
        "tokens/s",
        "KV bytes/token",
        "mean |dlogprob|",
        "max |dlogprob|",
        "same top-1",
        "worst layers (attention error)",
    )

    @classmethod
    def of(cls, kv_dtype: str, scores: Scores, kv_token_bytes: int, difference: Difference | None) -> "Result":
        nll = -float(scores.logprobs.mean())
        return cls(kv_dtype, math.exp(nll), nll, scores.tokens / scores.seconds, kv_token_bytes, difference)

    def as_row(self) -> tuple[str, ...]:
        """See `TableRow`."""
        cells = (
            self.kv_cache_dtype,
            f"{self.perplexity:.4f}",
            f"{self.tokens_per_second:.0f}",
            f"{self.kv_bytes_per_token:,}",
        )
        difference = self.difference
        if difference is None:
            return (*cells, "", "", "", "")
        return (
            *cells,
            f"{difference.mean_abs_delta_logprob:.5f}",
            f"{difference.max_abs_delta_logprob:.4f}",
            f"{100 * difference.same_top1:.2f} %",
            ", ".join(f"{one.layer} ({100 * one.attention_error:.2f} %)" for one in difference.worst_layers),
        )


class TableRow(Protocol):
    """What a report lists: a dataclass whose last four cells are about its difference."""

    HEADER: ClassVar[tuple[str, ...]]

    @property
    def difference(self) -> object | None:
        """Against what it is compared with; None for nothing."""
        ...

    def as_row(self) -> tuple[str, ...]:
        """Cells below those of HEADER, empty where there is no difference."""
        ...


@dataclass(frozen=True)
class EvalReport:
    """An evaluation on a text.

    Attributes:
        dtype: dtype name of activations and unquantised parameters.
        window: tokens of a window.
        num_windows: windows the text was cut into.
        num_scored: tokens with a score: all but the first of each window.
        results: at least one, all of a kind, in the order they were measured.
    """

    dtype: str
    window: int
    num_windows: int
    num_scored: int
    results: Sequence[TableRow]

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)

    def as_text(self) -> str:
        """A table, a line for each result."""
        begin = (
            f"{self.num_scored:,} tokens scored in windows of {self.window:,} ({self.num_windows:,}), "
            f"activations in {self.dtype}"
        )
        rows = [self.results[0].HEADER, *(result.as_row() for result in self.results)]
        if all(result.difference is None for result in self.results):
            rows = [row[:4] for row in rows]
        return "\n".join([begin, "", *_table(rows)])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells that stand below each other."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
