"""Evaluates ways of storing a model's weights on a text, one engine after the other."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np

from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.evaluation.report import EvalReport
from jaxinfer.evaluation.scoring import Scorer, Scores
from jaxinfer.evaluation.subject import Subject
from jaxinfer.startup.quantization import checked_options, named_method, refuse_without_method

OnWindow = Callable[[str, RequestOutput], None]


@dataclass(frozen=True)
class WeightDifference:
    """Against the same tokens' scores with unquantised weights.

    Attributes:
        perplexity_ratio: its perplexity over theirs.
        mean_abs_delta_logprob: mean of the absolute difference of a token's log-probabilities, in nats.
        max_abs_delta_logprob: the largest.
        same_top1: share of places, 0 to 1, at which the same token is the most probable.
    """

    perplexity_ratio: float
    mean_abs_delta_logprob: float
    max_abs_delta_logprob: float
    same_top1: float

    @classmethod
    def of(cls, scores: Scores, reference: Scores) -> "WeightDifference":
        """Of scores of the same windows."""
        delta = scores.logprobs - reference.logprobs
        return cls(
            math.exp(-float(delta.mean())),
            float(np.abs(delta).mean()),
            float(np.abs(delta).max()),
            float((scores.best_ids == reference.best_ids).mean()),
        )


@dataclass(frozen=True)
class WeightResult:
    """One way of storing the weights.

    Attributes:
        name: the method, a folder's name, or the dtype of unquantised weights.
        perplexity: ``exp(nll)``.
        nll: mean negative log-probability of a token, in nats.
        tokens_per_second: that went through the model, compilation not counted.
        weight_bytes: of the parameters as the engine holds them.
        difference: against unquantised weights; None for these, and where nothing is compared.
    """

    name: str
    perplexity: float
    nll: float
    tokens_per_second: float
    weight_bytes: int
    difference: WeightDifference | None
    HEADER: ClassVar[tuple[str, ...]] = (
        "weights",
        "perplexity",
        "weight bytes",
        "tokens/s",
        "delta",
        "mean |dlogprob|",
        "max |dlogprob|",
        "same top-1",
    )

    @classmethod
    def of(cls, name: str, scores: Scores, weight_bytes: int, reference: Scores | None) -> "WeightResult":
        nll = -float(scores.logprobs.mean())
        difference = None if reference is None else WeightDifference.of(scores, reference)
        return cls(name, math.exp(nll), nll, scores.tokens / scores.seconds, weight_bytes, difference)

    def as_row(self) -> tuple[str, ...]:
        """See `TableRow`."""
        cells = self.name, f"{self.perplexity:.4f}", f"{self.weight_bytes:,}", f"{self.tokens_per_second:.0f}"
        difference = self.difference
        if difference is None:
            return (*cells, "", "", "", "")
        return (
            *cells,
            f"{100 * (difference.perplexity_ratio - 1):+.2f} %",
            f"{difference.mean_abs_delta_logprob:.5f}",
            f"{difference.max_abs_delta_logprob:.4f}",
            f"{100 * difference.same_top1:.2f} %",
        )


def compared_subjects(
    subject: Subject,
    methods: Sequence[str],
    options: Mapping[str, Any],
    others: Sequence[str],
    *,
    compare: bool,
) -> dict[str, Subject]:
    """What is to be measured, by name: unquantised first if something is compared, then each method, then others.

    Args:
        subject: the model, with the settings that all share and no `quantization`.
        methods: values of `quantization`.
        options: of `quantization_config`; each method and each quantised checkpoint gets those that it takes.
        others: further checkpoints of the same model, quantised or not, which are measured as they are.
        compare: whether to measure the unquantised model, under the name "".

    Raises:
        ValueError: a method or a checkpoint does not exist, a checkpoint has another vocabulary, or nothing takes one
            of the options.
        TypeError: an option is of the wrong type.
    """
    found = {"": subject} if compare else {}
    unused = dict(options)

    def asked(subject: Subject, method: str) -> Subject:
        named_method(method)
        taken = {name: value for name, value in options.items() if _takes(method, name, value)}
        for name in taken:
            unused.pop(name, None)
        return replace(subject, args=replace(subject.args, quantization=method, quantization_config=taken or None))

    for method in methods:
        found[method] = asked(subject, method)
    for other in others:
        one = Subject.find(replace(subject.args, model=other))
        sizes = one.config.vocab_size, subject.config.vocab_size
        if sizes[0] != sizes[1]:
            raise ValueError(f"{other} has {sizes[0]} tokens, not the {sizes[1]} of {subject.args.model}")
        found[other] = one if one.checkpoint.layout is None else asked(one, one.checkpoint.layout.method)
    if unused:
        refuse_without_method(checked_options(named_method(methods[0]) if methods else None, unused))
    return found


def _takes(method: str, name: str, value: Any) -> bool:
    try:
        checked_options(named_method(method), {name: value})
    except (ValueError, TypeError):
        return False
    return True


def evaluate_weights(
    subjects: Mapping[str, Subject],
    windows: Sequence[list[int]],
    *,
    on_window: OnWindow = lambda name, output: None,
) -> EvalReport:
    """Scores the windows with each way of storing the weights; one set of weights is there at a time.

    Args:
        subjects: of `compared_subjects`; the name "" stands for unquantised weights, which the others are compared
            with.
        windows: of `text_windows`.
        on_window: called with the name that is being measured and each finished window.

    Raises:
        ValueError: a setting is refused, by name.
        RuntimeError: a window failed, with the reason.
        KeyboardInterrupt: on Ctrl-C, between two steps.
    """
    window = max(map(len, windows))
    reference: Scores | None = None
    results = []
    for key, subject in subjects.items():
        name = key or subject.dtype
        params = subject.load()
        scorer = Scorer(subject.args, subject.config, subject.dtype, params, window)
        try:
            scores = scorer.score(windows, lambda output, name=name: on_window(name, output))  # type: ignore[misc]
        finally:
            scorer.close()
        nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        del params, scorer
        results.append(WeightResult.of(name, scores, nbytes, reference))
        if not key:
            reference = scores
    dtype = next(iter(subjects.values())).dtype
    return EvalReport(dtype, window, len(windows), sum(len(tokens) - 1 for tokens in windows), results)
