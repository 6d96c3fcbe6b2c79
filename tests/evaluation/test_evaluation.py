"""Windows, scores and what is made of them, on a small random model."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from jaxinfer.evaluation.attention_error import attention_errors
from jaxinfer.evaluation.evaluate import evaluate
from jaxinfer.evaluation.report import Difference, EvalReport, Result
from jaxinfer.evaluation.scoring import Scorer, Scores
from jaxinfer.evaluation.weights import WeightResult
from jaxinfer.evaluation.windows import text_windows
from jaxinfer.models.attention import split_rotated
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.startup.args import EngineArgs
from pallas_kernels.kv_format import FORMATS, dequantize, quantize

ARGS = EngineArgs("m", max_num_batched_tokens=16, compilation_cache_dir=False)


class Letters:
    """A token for each letter; BOS is 1."""

    bos_token_id = 1

    def __init__(self, adds_bos: bool) -> None:
        self.adds_bos = adds_bos

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [ord(letter) for letter in text]
        return [1, *ids] if add_special_tokens and self.adds_bos else ids


def test_windows() -> None:
    a, b, c, d, e = b"abcde"
    assert text_windows(Letters(False), "abcde", 2) == [[a, b], [c, d]]  # a last token alone predicts nothing
    assert text_windows(Letters(False), "abcde", 3) == [[a, b, c], [d, e]]
    assert text_windows(Letters(False), "abcde", 100) == [[a, b, c, d, e]]
    assert text_windows(Letters(True), "abcde", 3) == [[1, a, b], [1, c, d], [1, e]]
    with pytest.raises(ValueError, match="window=1 leaves no token"):
        text_windows(Letters(False), "abcde", 1)
    for text in ("", "a"):
        with pytest.raises(ValueError, match=f"the text has {len(text)} tokens"):
            text_windows(Letters(False), text, 4)


def test_arithmetic_of_a_report() -> None:
    reference = Scores(np.array([-1.0, -2.0, -3.0, -2.0]), np.array([1, 2, 3, 4]), tokens=6, seconds=2.0)
    scores = Scores(np.array([-1.5, -2.0, -2.75, -3.25]), np.array([1, 2, 3, 5]), tokens=6, seconds=3.0)
    difference = Difference.of(scores, reference, np.array([0.1, 0.4, 0.2, 0.3]))
    assert (difference.mean_abs_delta_logprob, difference.max_abs_delta_logprob) == (0.5, 1.25)
    assert difference.same_top1 == 0.75
    assert [(one.layer, one.attention_error) for one in difference.worst_layers] == [(1, 0.4), (3, 0.3), (2, 0.2)]
    alone, compared = Result.of("float32", reference, 100, None), Result.of("int8", scores, 40, difference)
    assert alone.nll == 2.0 and alone.perplexity == pytest.approx(7.389056)
    assert (alone.tokens_per_second, compared.tokens_per_second) == (3.0, 2.0)
    report = EvalReport("float32", 4, 2, 4, [alone, compared])
    written = report.as_dict()["results"][1]
    assert written["difference"]["worst_layers"][0] == {"layer": 1, "attention_error": 0.4}
    assert (written["kv_cache_dtype"], written["kv_bytes_per_token"]) == ("int8", 40)
    table = report.as_text().splitlines()
    assert "same top-1" in table[2] and "75.00 %" in table[4] and "1 (40.00 %), 3 (30.00 %)" in table[4]
    assert "same top-1" not in EvalReport("float32", 4, 2, 4, [alone]).as_text()


def test_arithmetic_of_a_report_on_weights() -> None:
    reference = Scores(np.array([-1.0, -2.0, -3.0, -2.0]), np.array([1, 2, 3, 4]), tokens=6, seconds=2.0)
    scores = Scores(np.array([-1.5, -2.0, -2.75, -3.25]), np.array([1, 2, 3, 5]), tokens=6, seconds=3.0)
    results = [WeightResult.of("float32", reference, 400, None), WeightResult.of("int8", scores, 100, reference)]
    difference = results[1].difference
    assert difference is not None and results[1].nll == 2.375
    assert difference.perplexity_ratio == pytest.approx(1.454991)  # e ** 0.375
    assert (difference.mean_abs_delta_logprob, difference.max_abs_delta_logprob) == (0.5, 1.25)
    lines = EvalReport("float32", 4, 2, 4, results).as_text().splitlines()
    assert lines[4].split()[:5] == ["int8", f"{np.exp(2.375):.4f}", "100", "2", "+45.50"]
    assert "delta" not in EvalReport("float32", 4, 2, 4, results[:1]).as_text()


@pytest.fixture(scope="module")
def model(tiny_config: ModelConfig, tiny_params: Callable[[int], Any]) -> tuple[ModelConfig, Any]:
    return tiny_config, jax.device_put(tiny_params(0))


@pytest.fixture(scope="module")
def windows() -> list[list[int]]:
    tokens = np.random.default_rng(0).integers(0, 256, 60).tolist()
    return [tokens[:24], tokens[24:48], tokens[48:]]


def through(kv_format: Any, rows: jax.Array) -> jax.Array:
    if kv_format is None:
        return rows
    mixing = jnp.asarray(scipy.linalg.hadamard(8) / 8**0.5, jnp.float32) if kv_format.name == "int4" else jnp.eye(8)
    return dequantize(*quantize(rows @ mixing, kv_format)) @ mixing.T


def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention over ``[T, K, H]``, without pages."""
    k, v = (jnp.repeat(rows, q.shape[1] // rows.shape[1], 1) for rows in (k, v))
    logits = jnp.einsum("tnh,snh->nts", q, k) * q.shape[-1] ** -0.5
    visible = jnp.tril(jnp.ones(logits.shape[1:], bool))
    return jnp.einsum("nts,snh->tnh", jax.nn.softmax(jnp.where(visible, logits, -1e30)), v)


def run_dense(model: tuple[ModelConfig, Any], tokens: list[int], kv_format: Any) -> tuple[np.ndarray, list[float]]:
    """Logits, and each layer's relative error were its keys and values quantised."""
    config, params = model
    decoder, ids = Decoder(config), jnp.array(tokens)
    errors = []

    def attend(qkv: jax.Array, angles: Any, cache: Any, sight: Any) -> tuple[jax.Array, Any]:
        q, k, v = split_rotated(qkv, angles)
        out = dense(q, k, v)
        quantised = dense(q, through(kv_format, k), through(kv_format, v))
        return out, jnp.sqrt(jnp.sum((quantised - out) ** 2) / jnp.sum(out**2))

    attention = jax.tree_util.Partial(attend)
    hidden, errors = decoder.apply({"params": params}, ids, jnp.arange(len(ids)), attention, [None, None])
    logits = decoder.apply({"params": params}, hidden, method=Decoder.logits)
    return np.asarray(logits, np.float64), [float(error) for error in errors]


def test_scores_are_the_decoders(model: tuple[ModelConfig, Any], windows: list[list[int]]) -> None:
    scorer = Scorer(ARGS, model[0], "float32", model[1], window=24)
    seen = []
    scores = scorer.score(windows, seen.append)
    assert scorer.num_compiled == 1 and len(seen) == 3
    scorer.close()
    logprobs, best = [], []
    for window in windows:
        logits, _ = run_dense(model, window, None)
        logits = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        logprobs += [logits[place, token] for place, token in enumerate(window[1:])]
        best += logits[:-1].argmax(-1).tolist()
    np.testing.assert_allclose(scores.logprobs, logprobs, atol=1e-4)
    assert scores.best_ids.tolist() == best
    assert scores.tokens == 60 and scores.seconds > 0


def test_attention_errors(model: tuple[ModelConfig, Any], windows: list[list[int]]) -> None:
    config, params = model
    errors = attention_errors(config, params, "float32", windows[0], ("int8", "int4"))
    assert list(errors) == ["int8", "int4"]
    for kv_format in FORMATS:
        if kv_format.name in errors:
            _, expected = run_dense(model, windows[0], kv_format)
            np.testing.assert_allclose(errors[kv_format.name], expected, rtol=1e-3)
    assert errors["int8"].max() < 0.05 < errors["int4"].min()


def test_a_comparison(model: tuple[ModelConfig, Any], windows: list[list[int]]) -> None:
    seen: list[str] = []
    report = evaluate(
        ARGS,
        *model,
        "float32",
        windows,
        ["int4"],
        compare=True,
        on_window=lambda kv_dtype, output: seen.append(kv_dtype),
    )
    plain, coded = report.results
    assert seen == ["float32"] * 3 + ["int4"] * 3
    assert (report.window, report.num_windows, report.num_scored) == (24, 3, 57)
    assert (plain.kv_cache_dtype, plain.difference, plain.kv_bytes_per_token) == ("float32", None, 2 * 2 * 2 * 8 * 4)
    assert (coded.kv_cache_dtype, coded.kv_bytes_per_token) == ("int4", 2 * 2 * 2 * (4 + 4))
    assert coded.difference is not None
    assert coded.difference.mean_abs_delta_logprob > 0.05 and 0 < coded.difference.same_top1 < 1
    assert {one.layer for one in coded.difference.worst_layers} == {0, 1}
    assert abs(coded.nll - plain.nll) <= coded.difference.mean_abs_delta_logprob
