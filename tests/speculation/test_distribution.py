"""Unseeded sampling follows the target's distribution: chi-square over 512 triples of a vocabulary of 8."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from jaxinfer.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig, SpeculationConfig
from jaxinfer.engine.draft import Draft
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.request import Request
from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams
from jaxinfer.models.config import ModelConfig
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.speculation.lookahead import LookaheadProposer, LookaheadShape
from jaxinfer.speculation.ngram import NgramProposer
from tests.speculation.conftest import Bench, Guesses, make_bench

V, PROMPT = 8, [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def eight_tokens() -> ModelConfig:
    return ModelConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )


@pytest.fixture(scope="module")
def bench_of_64(eight_tokens: ModelConfig, random_params: Callable[..., Any]) -> Bench:
    config = EngineConfig(
        eight_tokens,
        CacheConfig(block_size=4, num_blocks=400),
        SchedulerConfig(64, 256, 32, token_buckets=(256,)),
        RunnerConfig(enforce_eager=True),
        speculation=SpeculationConfig(3, max_running=64, keeps_probabilities=True),
    )
    return make_bench(config, random_params(eight_tokens, seed=11, scale=0.15))


def naive_logits(config: ModelConfig, params: Any, ids: np.ndarray) -> np.ndarray:
    """[B, T, V] of the whole sequences, written out in numpy in float64."""
    length, head_dim = ids.shape[1], config.head_dim
    frequencies = config.rope_theta ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.arange(length)[:, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * scale

    def turned(x: np.ndarray) -> np.ndarray:  # [B, T, K, G, H]
        first, second = np.split(x, 2, axis=-1)
        c, s = cos[:, None, None], sin[:, None, None]
        return np.concatenate([first * c - second * s, second * c + first * s], axis=-1)

    x = params["embed"]["embedding"][ids].astype(np.float64)
    for layer in range(config.num_hidden_layers):
        p = params[f"layers_{layer}"]
        qkv = np.einsum("btd,kghd->btkgh", norm(x, p["attn_norm"]["scale"]), p["attn"]["qkv"]["kernel"])
        q, k, v = turned(qkv[:, :, :, :-2]), turned(qkv[:, :, :, -2:-1])[:, :, :, 0], qkv[:, :, :, -1]
        scores = np.einsum("btkgh,bskh->bkgts", q, k) * head_dim**-0.5
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
        mixed = np.einsum("bkgts,bskh->btkgh", softmax(scores), v)
        x = x + np.einsum("btkgh,dkgh->btd", mixed, p["attn"]["out"]["kernel"])
        gate, up = np.moveaxis(
            np.einsum("btd,cfd->btcf", norm(x, p["mlp_norm"]["scale"]), p["mlp"]["gate_up"]["kernel"]), 2, 0
        )
        x = x + np.einsum("btf,df->btd", gate / (1 + np.exp(-gate)) * up, p["mlp"]["down"]["kernel"])
    return norm(x, params["final_norm"]["scale"]) @ params["lm_head"]["kernel"].T


def softmax(x: np.ndarray) -> np.ndarray:
    shares = np.exp(x - x.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def filtered(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities of [B, V] after temperature, top-k and top-p, row by row."""
    shares = np.zeros_like(logits)
    for row, scaled in enumerate(logits / params.temperature):
        order = np.argsort(-scaled)[: params.top_k or V]
        best = softmax(scaled[order])
        count = int(np.argmax(np.cumsum(best) >= params.top_p)) + 1 if params.top_p < 1 else len(order)
        shares[row, order[:count]] = best[:count] / best[:count].sum()
    return shares


def exact(config: ModelConfig, weights: Any, params: SamplingParams) -> np.ndarray:
    """float64[512]: probabilities of output tokens 1, 2 and 3, whatever token 0 is."""
    tails = np.array(list(itertools.product(range(V), repeat=4)))
    ids = np.concatenate([np.tile(PROMPT, (len(tails), 1)), tails], axis=1)
    logits = naive_logits(config, weights, ids)
    probability = np.ones(len(tails))
    for index in range(4):
        shares = filtered(logits[:, len(PROMPT) - 1 + index], params)
        probability *= shares[np.arange(len(tails)), tails[:, index]]
    return probability.reshape(V, -1).sum(axis=0)


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Of Pearson's chi-square, cells under 5 pooled; by Wilson and Hilferty's approximation."""
    large = expected >= 5
    cells = [(counts[large], expected[large]), (counts[~large].sum(keepdims=True), expected[~large].sum(keepdims=True))]
    seen, wanted = (np.concatenate(part) for part in zip(*cells, strict=True))
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    chi, freedom = float(((seen - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    z = ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


SETTINGS = {"plain": {"temperature": 1.0}, "filtered": {"temperature": 0.7, "top_k": 3, "top_p": 0.8}}


def triples(bench: Bench, proposer: Any, params: SamplingParams, requests: int) -> tuple[np.ndarray, float]:
    """int64[512], how often each came, and the acceptance length."""
    engine = bench.engine(proposer, 3, blocks=400)
    for index in range(requests):
        engine.add_request(str(index), PROMPT, params)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    drawn = np.array([sample.token_ids[1:4] for output in outputs for sample in output.outputs])
    assert len(drawn) == requests * params.n
    stats = engine.stats().speculation
    assert stats is not None
    return np.bincount(drawn @ [64, 8, 1], minlength=512), stats.acceptance_length


def check_triples(bench: Bench, proposer: Any, model: ModelConfig, setting: str, requests: int, n: int) -> None:
    params = SamplingParams(
        n=n, max_tokens=5, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY, **SETTINGS[setting]
    )
    counts, acceptance = triples(bench, proposer, params, requests)
    probability = exact(model, bench.params, params)
    assert probability.sum() == pytest.approx(1.0)
    assert 1.05 < acceptance < 3.0  # some guesses are right and some are wrong
    assert counts[probability == 0.0].sum() == 0
    assert p_value(counts, probability * requests * n) > 0.001


class Trees(Guesses):
    """Random trees of three tokens: all in a row, two and one behind the first, and so on."""

    def propose(self, rows: Sequence[tuple[Request, int]]) -> list[Draft]:
        return [self._tree(min(count, 3)) for _, count in rows]

    def _tree(self, count: int) -> Draft:
        parents = tuple(int(self._rng.integers(-1, index)) if index else -1 for index in range(count))
        return Draft(tuple(self._rng.integers(0, V, count).tolist()), parents=parents)


@pytest.fixture(scope="module")
def trees_of_64(eight_tokens: ModelConfig, random_params: Callable[..., Any]) -> Bench:
    config = EngineConfig(
        eight_tokens,
        CacheConfig(block_size=4, num_blocks=400),
        SchedulerConfig(64, 256, 32, token_buckets=(256,)),
        RunnerConfig(enforce_eager=True),
        speculation=SpeculationConfig(3, max_running=64, tree_depth=3),
    )
    params = random_params(eight_tokens, seed=11, scale=0.15)
    return Bench(config, ModelRunner(config, params), None, params)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", ["random trees", pytest.param("lookahead", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("requests", "n"), [(1, 1_500), pytest.param(2, 10_000, marks=pytest.mark.slow)])
def test_triples_of_trees(
    trees_of_64: Bench, eight_tokens: ModelConfig, method: str, setting: str, requests: int, n: int
) -> None:
    """What is accepted of certain guesses is what was drawn: no rejection sampling is needed."""
    proposer = Trees() if method == "random trees" else LookaheadProposer(LookaheadShape(1, 3, 1))
    check_triples(trees_of_64, proposer, eight_tokens, setting, requests, n)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", ["draft model", "ngram"])
@pytest.mark.parametrize(("requests", "n"), [(1, 1_500), pytest.param(2, 10_000, marks=pytest.mark.slow)])
def test_triples(
    bench_of_64: Bench,
    eight_tokens: ModelConfig,
    random_params: Callable[..., Any],
    method: str,
    setting: str,
    requests: int,
    n: int,
) -> None:
    proposer: Any = NgramProposer(1, 3)
    if method == "draft model":
        proposer = bench_of_64.drafter(random_params(eight_tokens, seed=12, scale=0.15))
    check_triples(bench_of_64, proposer, eight_tokens, setting, requests, n)


def test_the_test_can_fail(eight_tokens: ModelConfig, bench_of_64: Bench) -> None:
    """Counts of the unfiltered distribution do not pass for the filtered one, nor those of a slightly warmer one."""
    rng = np.random.default_rng(0)
    cold, warm = (exact(eight_tokens, bench_of_64.params, SamplingParams(temperature=t)) for t in (1.0, 1.15))
    assert p_value(rng.multinomial(20_000, cold), cold * 20_000) > 0.001
    assert p_value(rng.multinomial(20_000, warm), cold * 20_000) < 0.001
