"""Evaluates cache dtypes on a text, one engine after the other on the same parameters."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.evaluation.attention_error import attention_errors
from jaxinfer.evaluation.report import Difference, EvalReport, Result
from jaxinfer.evaluation.scoring import Scorer, Scores
from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.memory import kv_token_bytes
from jaxinfer.startup.args import EngineArgs
from jaxinfer.typing import Params

OnWindow = Callable[[str, RequestOutput], None]


def evaluate(
    args: EngineArgs,
    model: ModelConfig,
    params: Params,
    dtype: str,
    windows: Sequence[list[int]],
    kv_dtypes: Sequence[str],
    *,
    compare: bool,
    on_window: OnWindow = lambda kv_dtype, output: None,
) -> EvalReport:
    """Scores the windows with each cache dtype.

    Args:
        args: the engine's settings; see `Scorer`.
        model: the architecture.
        params: on the device, of dtype `dtype`.
        dtype: dtype name of parameters and activations.
        windows: of `text_windows`.
        kv_dtypes: of `jaxinfer.config.KV_CACHE_DTYPES`, each once; with `compare` without `dtype`.
        compare: score with an unquantised cache too, first, and say how the others differ from it, in all and by layer.
        on_window: called with the dtype that is being measured and each finished window.

    Raises:
        ValueError: a setting is refused, by name.
        RuntimeError: a window failed, with the reason.
        KeyboardInterrupt: on Ctrl-C, between two steps.
    """
    window = max(map(len, windows))

    def measure(kv_dtype: str) -> Scores:
        scorer = Scorer(replace(args, kv_cache_dtype=kv_dtype), model, dtype, params, window)
        try:
            return scorer.score(windows, lambda output: on_window(kv_dtype, output))
        finally:
            scorer.close()

    def result(kv_dtype: str, scores: Scores, difference: Difference | None) -> Result:
        return Result.of(kv_dtype, scores, kv_token_bytes(model, kv_dtype), difference)

    reference = measure(dtype) if compare else None
    errors: dict[str, np.ndarray] = attention_errors(model, params, dtype, windows[0], kv_dtypes) if compare else {}
    results = [] if reference is None else [result(dtype, reference, None)]
    for kv_dtype in kv_dtypes:
        scores = measure(kv_dtype)
        difference = None if reference is None else Difference.of(scores, reference, errors[kv_dtype])
        results.append(result(kv_dtype, scores, difference))
    return EvalReport(dtype, window, len(windows), sum(len(tokens) - 1 for tokens in windows), results)
