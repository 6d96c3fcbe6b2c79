"""Attention of unrolled drafts against the definition, one query at a time."""

import jax
import numpy as np
import pytest

from jaxinfer.models.attention import Sight
from jaxinfer.models.rope import Rotation
from jaxinfer.training.unrolled_attention import UnrolledAttention

SEGMENTS = np.array([[0, 0, 0, 1, 1], [0, 0, 0, 0, -1]], np.int32)
NO_ROTATION = Rotation(np.ones((10, 2), np.float32), np.zeros((10, 2), np.float32))


@pytest.mark.parametrize("sight", [Sight(), Sight(window=3, scale=0.3, softcap=2.0)], ids=["plain", "bounded"])
def test_a_draft_sees_its_text_up_to_its_beginning_and_itself(sight: Sight) -> None:
    rng = np.random.default_rng(0)
    steps = [rng.standard_normal((10, 2, 4, 4)).astype(np.float32) for _ in range(3)]  # 2 KV heads of 2 queries
    attend, cache = UnrolledAttention(SEGMENTS, 2), ()
    for depth, qkv in enumerate(steps):
        out, cache = jax.jit(attend.__call__, static_argnums=3)(qkv, NO_ROTATION, cache, sight)
        assert out.shape == (10, 4, 4) and len(cache) == depth + 1
        for row in range(2):
            for place in range(5):
                seen = [(0, other) for other in range(place + 1) if SEGMENTS[row, other] == SEGMENTS[row, place]]
                seen += [(step, place) for step in range(1, depth + 1)]
                if sight.window:
                    seen = [(s, other) for s, other in seen if place + depth - (other + s) < sight.window]
                for head in range(4):
                    query = qkv[row * 5 + place, head // 2, head % 2]
                    keys = np.stack([steps[s][row * 5 + other, head // 2, 2] for s, other in seen])
                    values = np.stack([steps[s][row * 5 + other, head // 2, 3] for s, other in seen])
                    logits = keys @ query * (sight.scale or 0.5)
                    if sight.softcap:
                        logits = sight.softcap * np.tanh(logits / sight.softcap)
                    weights = np.exp(logits - logits.max())
                    expected = weights @ values / weights.sum()
                    np.testing.assert_allclose(out[row * 5 + place, head], expected, rtol=1e-4, atol=1e-5)
