"""The distillation loss of a batch, put together by hand from the models' logits."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.sequence import SequenceDecoder
from jaxinfer.training.distillation_loss import DistillationLoss, TextLoss, top_scores
from jaxinfer.training.packing import PADDING

IDS = np.array([[5, 1, 7, 2, 9, 4], [3, 3, 8, 1, 0, 0]], np.int32)
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, PADDING, PADDING]], np.int32)
COUNTED = np.array([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0]], bool)
TEMPERATURE, K = 2.0, 5


def log_softmax(logits: Any) -> np.ndarray:
    wide = np.asarray(logits, np.float64)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (np.exp(p) * (p - q)).sum(-1)


def merged(logprobs: np.ndarray, ids: np.ndarray) -> np.ndarray:
    top = np.take_along_axis(logprobs, ids, -1)
    return np.concatenate([top, np.log(1 - np.exp(top).sum(-1, keepdims=True))], -1)


@pytest.mark.parametrize("top", [False, True], ids=["whole", "top"])
@pytest.mark.parametrize("objective", ["forward_kl", "reverse_kl"])
def test_terms_of_a_batch(small_config: ModelConfig, random_params: Any, objective: Any, top: bool) -> None:
    config = replace(small_config, num_hidden_layers=1)
    theirs, mine = random_params(config, 1), random_params(config, 2)
    batch: dict[str, Any] = {"ids": IDS, "segments": SEGMENTS}
    run = jax.jit(SequenceDecoder(config).__call__)
    p, q = (log_softmax(run(params, IDS, jnp.array(SEGMENTS))[:, :-1] / TEMPERATURE) for params in (theirs, mine))
    if top:
        scored = jax.jit(partial(top_scores, config, k=K, temperature=TEMPERATURE))(theirs, batch)
        ids = np.argsort(-p, -1)[..., :K]
        assert np.array_equal(np.asarray(scored["top_ids"])[COUNTED], ids[COUNTED])
        p, q, batch = merged(p, ids), merged(q, ids), batch | scored
    expected = (kl(p, q) if objective == "forward_kl" else kl(q, p))[COUNTED].sum()
    loss = jax.jit(DistillationLoss(config, config, objective, TEMPERATURE).__call__)
    sums = loss({"model": mine}, {} if top else theirs, batch)
    np.testing.assert_allclose(sums["divergence"], expected, rtol=1e-4)
    np.testing.assert_allclose(sums["loss"], expected * TEMPERATURE**2, rtol=1e-4)
    assert float(sums["weight"]) == COUNTED.sum()
    plain = log_softmax(run(mine, IDS, jnp.array(SEGMENTS))[:, :-1])
    nll = -np.take_along_axis(plain, IDS[:, 1:, None], -1)[..., 0][COUNTED].sum()
    np.testing.assert_allclose(sums["nll"], nll, rtol=1e-4)
    if not top and objective == "forward_kl":
        np.testing.assert_allclose(jax.jit(TextLoss(config).__call__)(mine, {}, batch)["loss"], nll, rtol=1e-4)
