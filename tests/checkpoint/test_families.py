"""Every family gives transformers' logits, whatever way the tokens are cut into steps, and its greedy ids."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from jaxinfer.checkpoint import load_params, open_checkpoint
from jaxinfer.models.config import ModelConfig

Case = Any  # conftest's FamilyCase
TOLERANCE = {"rtol": 0, "atol": 1e-4}
BLOCK_SIZE, NUM_PAGES, NUM_TOKENS = 4, 16, 24


class PagedRun:
    """One sequence through the paged step, so many tokens at a time; all calls are one compiled program."""

    def __init__(self, config: ModelConfig, params: Any) -> None:
        import jax
        import jax.numpy as jnp

        from jaxinfer.cache.paged import init_kv_cache
        from jaxinfer.models.decoder import Decoder
        from jaxinfer.runner.inputs import StepInput, StepSpec
        from jaxinfer.runner.step import make_attention

        spec = StepSpec(num_tokens=NUM_TOKENS, num_rows=1, table_width=NUM_PAGES - 1, sampler=False)
        table = jnp.arange(1, NUM_PAGES, dtype=jnp.int32)
        decoder = Decoder(config)

        def step(params: Any, kv: Any, tokens: jax.Array, done: jax.Array, count: jax.Array) -> Any:
            slots = jnp.arange(NUM_TOKENS, dtype=jnp.int32)
            positions = jnp.where(slots < count, done + slots, 0)
            inputs = StepInput(
                tokens=tokens,
                positions=positions,
                page_ids=jnp.where(slots < count, table[positions // BLOCK_SIZE], 0),
                token_slots=jnp.full_like(slots, -1),
                block_tables=table[None],
                query_start=jnp.stack([jnp.zeros_like(count), count]),
                context_lens=(done + count)[None],
                logits_tokens=slots,
                sampling=None,
            )
            attention = make_attention(inputs, spec, config, BLOCK_SIZE)
            hidden, kv = decoder.apply({"params": params}, tokens, positions, attention, kv)
            return decoder.apply({"params": params}, hidden, method=Decoder.logits), tuple(kv)

        # LLVM would take most of the time of programs that run once.
        self.step = jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})
        self.params, self.config = params, config
        self.init = lambda: init_kv_cache(config, NUM_PAGES, BLOCK_SIZE, "float32").layers

    def logits(self, tokens: list[int], counts: list[int]) -> np.ndarray:
        """Logits of each token, the tokens cut into pieces of `counts`."""
        kv, done, rows = self.init(), 0, []
        for count in counts:
            rows.append(self._advance(kv, tokens[done : done + count], done))
            kv, done = self.kv, done + count
        return np.concatenate(rows)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Ids of the likeliest continuation."""
        last, ids = self._advance(self.init(), prompt, 0), []
        for _ in range(count):
            ids.append(int(last[-1].argmax()))
            last = self._advance(self.kv, ids[-1:], len(prompt) + len(ids) - 1)
        return ids

    def _advance(self, kv: Any, tokens: list[int], done: int) -> np.ndarray:
        padded = np.zeros(NUM_TOKENS, np.int32)
        padded[: len(tokens)] = tokens
        out, self.kv = self.step(self.params, kv, padded, np.int32(done), np.int32(len(tokens)))
        return np.asarray(out)[: len(tokens)]


def test_prefill_chunks_decode_and_greedy(family_case: Case) -> None:
    """Scoring a text in one step, in chunks and token by token gives the same logits as transformers."""
    checkpoint = open_checkpoint(family_case.folder())
    config, params = checkpoint.model_config, load_params(checkpoint, "float32")
    if len(family_case.lengths) > 1:
        config = family_case.served_for(config, NUM_TOKENS)
    run, tokens = PagedRun(config, params), family_case.tokens
    expected = family_case.logits(len(tokens))
    for counts in ([24], [7, 9, 8], [20, 1, 1, 1, 1]):
        np.testing.assert_allclose(run.logits(tokens, counts), expected, **TOLERANCE, err_msg=str(counts))
    assert run.greedy(tokens, len(family_case.greedy)) == family_case.greedy


def test_lengths_around_the_trained_one(edge_case: Case, all_logits: Callable[..., np.ndarray]) -> None:
    """Scalings that depend on the length, served for the length that transformers sees."""
    checkpoint = open_checkpoint(edge_case.folder())
    params = load_params(checkpoint, "float32")
    for length in edge_case.lengths:
        config = edge_case.served_for(checkpoint.model_config, length)
        logits = all_logits(config, params, edge_case.tokens[:length])
        np.testing.assert_allclose(logits, edge_case.logits(length), **TOLERANCE, err_msg=f"{length} tokens")


def test_a_window_hides_from_its_first_position_on(window_case: Case, all_logits: Callable[..., np.ndarray]) -> None:
    """One wider would agree with transformers on texts up to the window, and on none beyond."""
    checkpoint = open_checkpoint(window_case.folder())
    config, params, tokens = checkpoint.model_config, load_params(checkpoint, "float32"), window_case.tokens
    width = window_case.config["sliding_window"]
    assert config.sliding_window == width < len(tokens) - 1
    wider = all_logits(replace(config, sliding_window=width + 1), params, tokens)
    error = np.abs(wider - window_case.logits(len(tokens))).max(-1)
    assert error[:width].max() < TOLERANCE["atol"]
    assert error[width:].min() > 10 * TOLERANCE["atol"]


def test_bfloat16_is_as_near_as_transformers_own(bf16_case: Case, all_logits: Callable[..., np.ndarray]) -> None:
    checkpoint = open_checkpoint(bf16_case.folder())
    params, count = load_params(checkpoint, "bfloat16"), len(bf16_case.tokens)
    config = bf16_case.served_for(checkpoint.model_config, count)
    error = all_logits(config, params, bf16_case.tokens) - bf16_case.logits(count)
    assert np.abs(error).mean() < 1.3 * bf16_case.bfloat16_error
