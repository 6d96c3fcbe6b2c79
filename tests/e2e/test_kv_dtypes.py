"""Field case 15: caches of few bits, against a decoder in numpy that quantises in the same places."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import scipy.linalg

from jaxinfer.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.models.config import ModelConfig
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.serving.inputs import TokenizedPrompt
from jaxinfer.serving.request_loop import RequestLoop

NUM_TOKENS = 32  # of a step, whatever it does: there is one program
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=0, prompt_logprobs=0, detokenize=False, ignore_eos=True)


@dataclass(frozen=True)
class Case:
    """A cache dtype on a model's shape."""

    dtype: str
    head_dim: int
    block_size: int


CASES = [
    Case("int8", 64, 16),
    Case("fp8_e4m3", 80, 16),
    Case("fp8_e5m2", 64, 8),
    Case("int4", 80, 4),
    Case("bfloat16", 64, 16),
]


class SmallEngine:
    """A random model in float32 on a pool of 160 tokens, with prompts cut into chunks of at most 32."""

    def __init__(self, case: Case, random_params: Callable[..., Any]) -> None:
        self.case = case
        self.config = ModelConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=case.head_dim,
            max_position_embeddings=128,
        )
        self.params = random_params(self.config)
        settings = EngineConfig(
            self.config,
            CacheConfig(case.block_size, 160 // case.block_size + 1, case.dtype),
            SchedulerConfig(NUM_TOKENS, NUM_TOKENS, 128, token_buckets=(NUM_TOKENS,)),
            RunnerConfig(max_logprobs=1, enforce_eager=True),
        )
        self.runner = ModelRunner(settings, self.params)
        self.engine = Engine(settings, self.runner, None)

    def serve(self, prompts: Sequence[list[int]], params: SamplingParams = GREEDY) -> list[RequestOutput]:
        """Finished outputs, in the prompts' order, of requests that arrive at once."""
        finished: dict[str, RequestOutput] = {}
        with RequestLoop(self.engine) as loop:
            for place, prompt in enumerate(prompts):
                loop.add(str(place), TokenizedPrompt(prompt), params)
            while len(loop):
                finished |= {output.request_id: output for output in loop.step() if output.finished}
        assert [output.error for output in finished.values()] == [None] * len(prompts)
        return [finished[str(place)] for place in range(len(prompts))]


THREE = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, logprobs=0, detokenize=False, ignore_eos=True)


def text(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, length)]


def logprobs_of(output: RequestOutput) -> np.ndarray:
    """Of all tokens but the first, prompt and output."""
    done = output.outputs[0]
    assert output.prompt_logprobs is not None and done.logprobs is not None
    tokens = [*output.prompt_token_ids[1:], *done.token_ids]
    entries = [*output.prompt_logprobs[1:], *done.logprobs]
    return np.array([entry[token].logprob for token, entry in zip(tokens, entries, strict=True)])


LIMITS = {"int8": 127.0, "int4": 7.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
FLOAT8 = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}


def through_cache(rows: np.ndarray, dtype: str) -> np.ndarray:
    """``rows[..., H]`` as they come out of a cache of `dtype`; float32 keeps them."""
    if dtype == "float32":
        return rows
    if dtype == "bfloat16":
        return rows.astype(ml_dtypes.bfloat16).astype(np.float64)
    if dtype == "int4":  # what is stored has its channels mixed, in stretches of a power of two
        size = rows.shape[-1] & -rows.shape[-1]
        mixing = scipy.linalg.block_diag(*[scipy.linalg.hadamard(size) / size**0.5] * (rows.shape[-1] // size))
        return through_codes(rows @ mixing, dtype) @ mixing.T
    return through_codes(rows, dtype)


def through_codes(rows: np.ndarray, dtype: str) -> np.ndarray:
    peaks = np.abs(rows).max(-1, keepdims=True)
    scales = np.where(peaks == 0, 1.0, peaks / LIMITS[dtype])
    codes = rows / scales
    codes = codes.astype(np.float32).astype(FLOAT8[dtype]).astype(np.float64) if dtype in FLOAT8 else np.rint(codes)
    return codes * scales


def numpy_decoder(config: ModelConfig, params: Any, tokens: list[int], kv_dtype: str) -> np.ndarray:
    """float64[T - 1]: the log-probability of each token after the first, by a Llama decoder in float64 whose attention
    sees keys and values as a cache of `kv_dtype` gives them back, the token's own included."""
    count, groups = len(tokens), config.num_query_groups
    x = params["embed"]["embedding"][tokens].astype(np.float64)
    visible = np.tril(np.ones((count, count), bool))
    for index in range(config.num_hidden_layers):
        layer = params[f"layers_{index}"]
        qkv = np.einsum("td,kghd->tkgh", _norm(config, x, layer["attn_norm"]), _wide(layer["attn"]["qkv"]["kernel"]))
        turned = _rotate(config, qkv[:, :, :-1])
        q, k = turned[:, :, :groups], through_cache(turned[:, :, groups], kv_dtype)
        v = through_cache(qkv[:, :, -1], kv_dtype)
        attended = _attend(q, k, v, visible, kv_dtype)
        x = x + np.einsum("tkgh,dkgh->td", attended, _wide(layer["attn"]["out"]["kernel"]))
        gate, up = np.einsum(
            "td,cfd->ctf", _norm(config, x, layer["mlp_norm"]), _wide(layer["mlp"]["gate_up"]["kernel"])
        )
        x = x + (gate / (1 + np.exp(-gate)) * up) @ _wide(layer["mlp"]["down"]["kernel"]).T
    logits = _norm(config, x, params["final_norm"]) @ _wide(params["lm_head"]["kernel"]).T
    logprobs = np.log(_softmax(logits))
    return logprobs[np.arange(count - 1), tokens[1:]]


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray, kv_dtype: str) -> np.ndarray:
    """A float pool is attended to in its own dtype: queries, unnormalised weights and results are rounded to it."""
    rounding = "bfloat16" if kv_dtype == "bfloat16" else "float32"
    q = through_cache(q, rounding)
    logits = np.where(visible, np.einsum("tkgh,skh->kgts", q, k) * q.shape[-1] ** -0.5, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    sums = weights.sum(-1)
    attended = np.einsum("kgts,skh->tkgh", through_cache(weights, rounding), v)
    return through_cache(attended / np.moveaxis(sums, -1, 0)[..., None], rounding)


def _wide(array: Any) -> np.ndarray:
    return np.asarray(array, np.float64)


def _norm(config: ModelConfig, x: np.ndarray, node: Any) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * _wide(node["scale"])


def _rotate(config: ModelConfig, x: np.ndarray) -> np.ndarray:
    """Rotary embedding of ``x[T, K, G, H]``, halves paired."""
    half = config.head_dim // 2
    angles = np.arange(len(x))[:, None] * config.rope_theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None, None], np.sin(angles)[:, None, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case.dtype}-{case.head_dim}-{case.block_size}")
def small(request: pytest.FixtureRequest, random_params: Callable[..., Any]) -> Iterator[SmallEngine]:
    made = SmallEngine(request.param, random_params)
    yield made
    assert made.runner.num_compiled <= 2  # the step, and the copy of blocks


def scaled(params: Any, config: ModelConfig, row: int, factor: float) -> Any:
    """The parameters with the keys' (row -2) or the values' (row -1) projections times a factor."""

    def change(path: Any, leaf: np.ndarray) -> np.ndarray:
        if "qkv" not in jax.tree_util.keystr(path):
            return leaf
        changed = leaf.copy()
        changed[:, row] *= factor
        return changed

    return jax.tree_util.tree_map_with_path(change, params)


@pytest.mark.parametrize(
    ("row", "factor"), [(-1, 0.0), (-2, 1.0), (-2, 200.0)], ids=["values all zero", "plain", "keys beyond 448"]
)
def test_tokens_see_what_the_pages_hold(small: SmallEngine, row: int, factor: float) -> None:
    params = scaled(small.params, small.config, row, factor)
    small.runner.release_kv()
    small.runner.restore_kv()
    small.runner.update_params(params)
    (output,) = small.serve([text(1, 60)])
    small.runner.update_params(small.params)
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    expected = numpy_decoder(small.config, params, tokens, small.case.dtype)
    difference = np.abs(logprobs_of(output) - expected)
    # A number in the middle of two codes may get either of them, which moves what comes after a little.
    assert difference.max() < 0.02 and np.median(difference) < 1e-4
    unquantised = numpy_decoder(small.config, params, tokens, "float32")
    if factor:
        assert np.abs(unquantised - expected).mean() > 3 * difference.mean()  # else this would have shown nothing
    else:
        pages = np.concatenate([_values(layer.pages) for layer in small.runner.kv.layers])
        assert not pages.any()  # zero rows stay zero


def _values(pages: jax.Array) -> np.ndarray:
    """The value rows of a pool, as numbers that are 0 where the codes are."""
    return np.asarray(pages[:, 1::2].astype(np.float32))


def test_batches_and_preemption_change_nothing(small: SmallEngine) -> None:
    prompts = [text(seed, 22 + 2 * seed) for seed in range(8)]
    alone = [small.serve([prompt])[0] for prompt in prompts]
    before = small.engine.stats().num_preemptions
    together = small.serve(prompts)
    assert small.engine.stats().num_preemptions > before
    for one, other in zip(alone, together, strict=True):
        assert other.outputs[0].token_ids == one.outputs[0].token_ids
        np.testing.assert_allclose(logprobs_of(other), logprobs_of(one), rtol=0, atol=1e-3)


def test_shared_copied_and_found_blocks_change_nothing(small: SmallEngine) -> None:
    """Three samples share the prompt's blocks, of which the last is partly filled; the second time they are found."""
    prompt = text(9, 27)
    first, again = (small.serve([prompt], THREE)[0] for _ in range(2))
    assert (
        first.num_cached_tokens == 0 and again.num_cached_tokens == 26 // small.case.block_size * small.case.block_size
    )
    assert len({tuple(sample.token_ids) for sample in first.outputs}) == 3
    for sample, repeated in zip(first.outputs, again.outputs, strict=True):
        assert sample.logprobs is not None and repeated.logprobs is not None
        assert repeated.token_ids == sample.token_ids
        expected = numpy_decoder(small.config, small.params, [*prompt, *sample.token_ids], small.case.dtype)[26:]
        for given in (sample, repeated):
            logprobs = [entry[token].logprob for token, entry in zip(given.token_ids, given.logprobs, strict=True)]
            np.testing.assert_allclose(logprobs, expected, rtol=0, atol=0.02)
