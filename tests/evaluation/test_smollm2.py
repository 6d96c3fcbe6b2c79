"""SmolLM2: perplexity against transformers, and field case 15's bounds on what a cache of few bits may cost."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache.paged import init_kv_cache
from jaxinfer.evaluation.attention_error import one_sequence
from jaxinfer.evaluation.scoring import Scorer
from jaxinfer.evaluation.subject import Subject
from jaxinfer.evaluation.windows import text_windows
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.sequence import SequenceDecoder
from jaxinfer.runner.inputs import StepSpec
from jaxinfer.runner.step import make_attention
from jaxinfer.startup.args import EngineArgs

pytestmark = pytest.mark.real_model

WINDOW = 512
HAMLET_NLL = 1466.8082275390625
"""Of the first 512 tokens of the play, by transformers in float32."""


@pytest.fixture(scope="module")
def subject(smollm2_path: Path) -> Subject:
    args = EngineArgs(smollm2_path, max_num_batched_tokens=256, compilation_cache_dir=False, use_tqdm_on_load=False)
    return Subject.find(args)


@pytest.fixture(scope="module")
def params(subject: Subject) -> Any:
    return subject.load()


@pytest.fixture(scope="module")
def prompt(golden: Mapping[str, Any]) -> Mapping[str, Any]:
    """200 tokens of prose, with transformers' log-probabilities."""
    (found,) = [prompt for prompt in golden["prompts"] if prompt["name"] == "raw_long"]
    return {"ids": found["prompt_ids"][:200], "logprobs": found["prompt_logprobs"][:199]}


def test_an_unquantised_cache_gives_transformers_scores(
    subject: Subject, params: Any, prompt: Mapping[str, Any]
) -> None:
    text = (Path(__file__).parents[1] / "data" / "hamlet.txt").read_text(encoding="utf-8")
    hamlet = text_windows(subject.tokenizer, text, WINDOW)
    assert [len(window) for window in hamlet] == [WINDOW] * 4
    scorer = Scorer(subject.args, subject.config, subject.dtype, params, WINDOW)
    scores = scorer.score([prompt["ids"], hamlet[0]])
    scorer.close()
    np.testing.assert_allclose(scores.logprobs[:199], prompt["logprobs"], rtol=0, atol=1e-3)
    assert -scores.logprobs[199:].sum() == pytest.approx(HAMLET_NLL, abs=0.05)


def test_whole_sequences_without_a_cache_give_transformers_scores(
    subject: Subject, params: Any, prompt: Mapping[str, Any]
) -> None:
    ids = jnp.array(prompt["ids"], jnp.int32)
    scores = jax.nn.log_softmax(SequenceDecoder(subject.config)(params, ids[None])[0])
    found = np.asarray(scores)[np.arange(199), prompt["ids"][1:]]
    np.testing.assert_allclose(found, prompt["logprobs"], rtol=0, atol=1e-3)


def predictions(subject: Subject, params: Any, tokens: list[int], kv_dtype: str) -> np.ndarray:
    """Log-probabilities [T, V] of one step through a cache of the dtype; of its layers only one is compiled."""
    ids, config = jnp.asarray(tokens, jnp.int32), subject.config
    width = -(-len(tokens) // 16)
    attention = make_attention(one_sequence(ids, width), StepSpec(len(tokens), 1, width, sampler=False), config, 16)
    run: Any = Decoder(config).apply
    pool = init_kv_cache(config, width + 1, 16, kv_dtype)
    hidden, _ = run({"params": params}, ids, jnp.arange(len(tokens)), attention, pool.layers)
    return np.asarray(jax.nn.log_softmax(run({"params": params}, hidden, method=Decoder.logits)))


@pytest.fixture(scope="module")
def unquantised(subject: Subject, params: Any, prompt: Mapping[str, Any]) -> np.ndarray:
    return predictions(subject, params, prompt["ids"], "float32")


@pytest.mark.parametrize(
    ("kv_dtype", "most", "least_top1"), [("int8", 0.05, 0.95), ("fp8_e4m3", 0.1, 0.9), ("int4", 0.5, 0.7)]
)
def test_what_a_quantised_cache_costs(
    subject: Subject,
    params: Any,
    prompt: Mapping[str, Any],
    unquantised: np.ndarray,
    kv_dtype: str,
    most: float,
    least_top1: float,
) -> None:
    """Teacher-forced; the log-probabilities of the text are compared with transformers'."""
    scores = predictions(subject, params, prompt["ids"], kv_dtype)
    assert np.isfinite(scores).all()
    delta = np.abs(scores[np.arange(199), prompt["ids"][1:]] - prompt["logprobs"])
    assert 0 < delta.mean() < most
    assert (scores.argmax(-1) == unquantised.argmax(-1)).mean() > least_top1
