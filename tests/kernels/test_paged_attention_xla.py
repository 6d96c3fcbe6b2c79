"""What is the XLA implementation's own: decodes and longer rows in one step, chunks with and without a tail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.work_list import PREFILL_TILE, make_tiles
from pallas_kernels.paged_attention.xla import CHUNK

HEADS, KV_HEADS, HEAD_DIM, PAGE = 4, 2, 8, 16
STEPS = {
    "decodes that end with a chunk": ([(1, CHUNK), (1, 2 * CHUNK), (1, CHUNK)], 8),
    "a decode that ends within a chunk": ([(1, CHUNK), (1, 2 * CHUNK - 3)], 8),
    "prompts beside decodes": ([(1, CHUNK), (40, 2 * CHUNK), (1, 7), (1, 2 * CHUNK), (2, CHUNK + 5)], 64),
}


def arranged(rows: list[tuple[int, int]]) -> tuple[jax.Array, jax.Array]:
    """query_start and context_lens of rows with (new, context) tokens."""
    new, contexts = np.transpose(rows).astype(np.int32)
    return jnp.asarray(np.concatenate([[0], np.cumsum(new)]), jnp.int32), jnp.asarray(contexts)


@pytest.mark.parametrize("name", STEPS)
def test_equals_a_loop_over_tokens_with_garbage_around(name: str) -> None:
    rows, num_tokens = STEPS[name]
    rng = np.random.default_rng(3)
    query_start, contexts = arranged(rows)
    tables = 1 + np.arange(len(rows) * 8, dtype=np.int32).reshape(len(rows), 8)
    pages = np.full((tables.size + 1, 2 * KV_HEADS, PAGE, HEAD_DIM), np.nan, np.float32)
    q = rng.standard_normal((num_tokens, HEADS, HEAD_DIM)).astype(np.float32)
    expected = np.zeros(q.shape)
    for row, (new, context) in enumerate(rows):
        keys, values = rng.standard_normal((2, context, KV_HEADS, HEAD_DIM)).astype(np.float32)
        for position in range(context):
            page = pages[tables[row, position // PAGE]]
            page[::2, position % PAGE], page[1::2, position % PAGE] = keys[position], values[position]
        for index in range(new):
            token, seen = int(query_start[row]) + index, context - new + index + 1
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                logits = keys[:seen, kv_head].astype(np.float64) @ q[token, head] / np.sqrt(HEAD_DIM)
                weights = np.exp(logits - logits.max())
                expected[token, head] = weights @ values[:seen, kv_head] / weights.sum()
    attend = jax.jit(paged_attention, static_argnames="implementation")
    out = attend(q, jnp.asarray(pages), jnp.asarray(tables), query_start, contexts, implementation="xla")
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_a_decode_does_not_take_the_tile_of_a_prompt() -> None:
    """In a tile of its own a decode would cost as much as `PREFILL_TILE` tokens."""
    rows, num_tokens = STEPS["prompts beside decodes"]
    single, longer = make_tiles(*arranged(rows), num_tokens)
    assert single.tokens.shape[1] == 1
    assert int(single.num_tiles) == sum(new == 1 for new, _ in rows)
    assert int(longer.num_tiles) == sum(-(-new // PREFILL_TILE) for new, _ in rows if new > 1)
