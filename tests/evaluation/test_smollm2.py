"""SmolLM2: perplexity against transformers, and field case 15's bounds on what a cache of few bits may cost."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.evaluation.scoring import Scorer, Scores
from jaxinfer.evaluation.subject import Subject
from jaxinfer.evaluation.windows import text_windows
from jaxinfer.startup.args import EngineArgs

pytestmark = pytest.mark.real_model

WINDOW = 512
HAMLET_NLL = 1466.8082275390625
"""Of the first 512 tokens of the play, by transformers in float32."""


class Model:
    """SmolLM2, loaded once; an engine a call."""

    def __init__(self, path: Path) -> None:
        args = EngineArgs(path, max_num_batched_tokens=256, compilation_cache_dir=False, use_tqdm_on_load=False)
        self.subject = Subject.find(args)
        self._params = self.subject.load()

    def score(self, kv_dtype: str, windows: list[list[int]]) -> Scores:
        subject = self.subject
        args = replace(subject.args, kv_cache_dtype=kv_dtype)
        scorer = Scorer(args, subject.config, subject.dtype, self._params, WINDOW)
        scores = scorer.score(windows)
        scorer.close()
        return scores


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Model:
    return Model(smollm2_path)


@pytest.fixture(scope="module")
def prompt(golden: Mapping[str, Any]) -> Mapping[str, Any]:
    """200 tokens of prose, with transformers' log-probabilities."""
    (found,) = [prompt for prompt in golden["prompts"] if prompt["name"] == "raw_long"]
    return {"ids": found["prompt_ids"][:200], "logprobs": found["prompt_logprobs"][:199]}


@pytest.fixture(scope="module")
def unquantised(model: Model, prompt: Mapping[str, Any]) -> Scores:
    """Of the prompt, and of Hamlet's first window behind it."""
    text = (Path(__file__).parents[1] / "data" / "hamlet.txt").read_text(encoding="utf-8")
    hamlet = text_windows(model.subject.tokenizer, text, WINDOW)
    assert len(hamlet) == 4
    return model.score("float32", [prompt["ids"], hamlet[0]])


def test_an_unquantised_cache_gives_transformers_scores(unquantised: Scores, prompt: Mapping[str, Any]) -> None:
    np.testing.assert_allclose(unquantised.logprobs[:199], prompt["logprobs"], rtol=0, atol=1e-3)
    assert -unquantised.logprobs[199:].sum() == pytest.approx(HAMLET_NLL, abs=0.05)


@pytest.mark.parametrize(
    ("kv_dtype", "most", "least_top1"), [("int8", 0.05, 0.95), ("fp8", 0.1, 0.9), ("int4", 0.5, 0.7)]
)
def test_what_a_quantised_cache_costs(
    model: Model, prompt: Mapping[str, Any], unquantised: Scores, kv_dtype: str, most: float, least_top1: float
) -> None:
    scores = model.score(kv_dtype, [prompt["ids"]])
    delta = np.abs(scores.logprobs - prompt["logprobs"])
    assert np.isfinite(scores.logprobs).all()
    assert 0 < delta.mean() < most
    assert (scores.best_ids == unquantised.best_ids[:199]).mean() > least_top1
