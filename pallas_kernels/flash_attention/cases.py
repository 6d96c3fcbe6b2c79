"""Named cases of real models, and operands for them; shared by tests, audits and benchmarks."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class FlashCase:
    """What `flash_attention` is compiled for.

    Attributes:
        num_queries, num_keys: T, S.
        num_heads, num_kv_heads, head_dim: N, K, H.
        batch: B.
        dtype: of all operands.
        causal, window, softcap: as in `flash_attention`.
        segments, lengths: whether there are segment ids and KV lengths.
    """

    num_queries: int
    num_keys: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    batch: int = 1
    dtype: str = "bfloat16"
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    segments: bool = False
    lengths: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The static arguments of `flash_attention`."""
        return {"causal": self.causal, "window": self.window, "softcap": self.softcap}

    @property
    def flops(self) -> float:
        """Of the two products of the forward pass, of the pairs under the diagonal only; other masks left aside."""
        pairs = float(self.num_queries * self.num_keys)
        if self.causal:
            pairs -= self.num_queries * (self.num_queries - 1) / 2
        return 4 * pairs * self.head_dim * self.num_heads * self.batch

    def abstract_operands(self) -> dict[str, Any]:
        """The array arguments without numbers, for compiling."""
        queries, keys = (self.batch, self.num_queries), (self.batch, self.num_keys)
        q = jax.ShapeDtypeStruct((*queries, self.num_heads, self.head_dim), self.dtype)
        kv = jax.ShapeDtypeStruct((*keys, self.num_kv_heads, self.head_dim), self.dtype)
        segments = tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (queries, keys))
        return {
            "q": q,
            "k": kv,
            "v": kv,
            "segment_ids": segments if self.segments else None,
            "kv_lengths": jax.ShapeDtypeStruct((self.batch,), jnp.int32) if self.lengths else None,
        }

    def make_operands(self, seed: int = 0) -> dict[str, Any]:
        """The array arguments at random: about four segments a row, rows at least half full."""
        rng = np.random.default_rng(seed)
        arrays = {
            name: jnp.asarray(rng.standard_normal(shape.shape, np.float32), shape.dtype)
            for name, shape in self.abstract_operands().items()
            if name in ("q", "k", "v")
        }
        lengths = rng.integers(self.num_keys // 2, self.num_keys, self.batch, endpoint=True)
        of_queries, of_keys = (
            np.sort(rng.integers(0, 4, (self.batch, length)), axis=1) for length in (self.num_queries, self.num_keys)
        )
        segments = (jnp.asarray(of_queries, jnp.int32), jnp.asarray(of_keys, jnp.int32))
        return {
            **arrays,
            "segment_ids": segments if self.segments else None,
            "kv_lengths": jnp.asarray(lengths, jnp.int32) if self.lengths else None,
        }


CASES: Mapping[str, FlashCase] = MappingProxyType(
    {
        "llama-3-8b 1k": FlashCase(1024, 1024),
        "llama-3-8b 4k": FlashCase(4096, 4096),
        "llama-3-8b 16k": FlashCase(16384, 16384),
        "mistral-7b 16k": FlashCase(16384, 16384, window=4096),
        "gemma-2-2b 8k": FlashCase(8192, 8192, 8, 4, 256, softcap=50.0, window=4096),
        "qwen2.5-0.5b packed": FlashCase(2048, 2048, 14, 2, 64, batch=4, segments=True),
        "phi-2 chunk": FlashCase(500, 3000, 32, 32, 80, dtype="float16"),
        "encoder, ragged": FlashCase(1000, 1000, 16, 16, 96, batch=4, causal=False, lengths=True),
        "window, ragged": FlashCase(4000, 4000, batch=2, window=1024, lengths=True),
        "multi-query, one token": FlashCase(1, 4096, 16, 1, 128, batch=8, lengths=True),
        "float32": FlashCase(1024, 1024, 9, 3, 64, dtype="float32"),
    }
)
"""One layer of each; bfloat16, causal."""
