"""How much each layer's attention suffers from a cache of fewer bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.paged import init_kv_cache
from jaxinfer.models.attention import Sight
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.rope import Rotation
from jaxinfer.runner.inputs import StepInput, StepSpec
from jaxinfer.runner.step import PagedAttention, make_attention
from jaxinfer.typing import Params

MAX_TOKENS = 2048
BLOCK_SIZE = 16


@partial(
    jax.tree_util.register_dataclass, data_fields=["paged"], meta_fields=["config", "num_blocks", "reference", "dtypes"]
)
@dataclass(frozen=True)
class ComparedAttention:
    """Attends through an unquantised cache, and beside it through one of each dtype (an `AttentionFn`).

    The layers that follow see the unquantised result, so each layer is measured on the inputs that it has without any
    quantisation. In place of a cache it returns the relative error of each dtype, float32[D].

    Attributes:
        paged: the engine's attention, for one sequence.
        config: the architecture.
        num_blocks: of the pools, which are made on the spot.
        reference: cache dtype of the unquantised cache.
        dtypes: those that are measured, D of them.
    """

    paged: PagedAttention
    config: ModelConfig
    num_blocks: int
    reference: str
    dtypes: tuple[str, ...]

    def __call__(self, qkv: jax.Array, angles: Rotation, cache: Any, sight: Sight) -> tuple[jax.Array, Any]:
        del cache
        out = self._attend(self.reference, qkv, angles, sight)
        exact = out.astype(jnp.float32)
        others = [self._attend(dtype, qkv, angles, sight).astype(jnp.float32) for dtype in self.dtypes]
        errors = jnp.stack([jnp.linalg.norm(other - exact) for other in others])
        return out, errors / jnp.maximum(jnp.linalg.norm(exact), jnp.finfo(jnp.float32).tiny)

    def _attend(self, dtype: str, qkv: jax.Array, angles: Rotation, sight: Sight) -> jax.Array:
        pool = init_kv_cache(self.config, self.num_blocks, BLOCK_SIZE, dtype)
        return self.paged(qkv, angles, pool.layers[0], sight)[0]


def attention_errors(
    config: ModelConfig, params: Params, dtype: str, tokens: Sequence[int], kv_dtypes: Sequence[str]
) -> dict[str, np.ndarray]:
    """The relative error of each layer's attention output when the cache of that layer alone is quantised.

    ``|A(q, K', V') - A(q, K, V)| / |A(q, K, V)|`` in the Frobenius norm over all tokens and heads, where K' and V' are
    read back from pages of the dtype, and q, K and V are what the layer gets from layers that are not quantised. It
    costs one forward pass without logits, and says in which layer information is lost; how much the model's predictions
    mind is what the difference of log-probabilities says.

    Args:
        config: the architecture.
        params: on the device.
        dtype: dtype name of parameters and activations, and of the cache that is compared with.
        tokens: one sequence; what exceeds `MAX_TOKENS` is left out.
        kv_dtypes: of `jaxinfer.config.KV_CACHE_DTYPES`.

    Returns:
        kv dtype -> float64[layers].
    """
    ids = jnp.asarray(tokens[:MAX_TOKENS], jnp.int32)
    width = -(-len(ids) // BLOCK_SIZE)

    spec = StepSpec(len(ids), 1, width, sampler=False)
    paged = jax.jit(lambda ids: make_attention(one_sequence(ids, width), spec, config, BLOCK_SIZE))(ids)
    attend = ComparedAttention(paged, config, width + 1, dtype, tuple(kv_dtypes))
    # Not one program: the layers' own, compiled once for all layers of a kind.
    run: Any = Decoder(config).apply
    positions = jnp.arange(len(ids), dtype=jnp.int32)
    _, measured = run({"params": params}, ids, positions, attend, [None] * config.num_hidden_layers)
    errors = np.asarray(jnp.stack(measured), np.float64)
    return {kv_dtype: errors[:, index] for index, kv_dtype in enumerate(kv_dtypes)}


def one_sequence(ids: jax.Array, width: int) -> StepInput:
    """All tokens of a sequence in one step, in pages 1 to `width`."""
    positions = jnp.arange(len(ids), dtype=jnp.int32)
    pages = jnp.arange(1, width + 1, dtype=jnp.int32)
    count = jnp.full((1,), len(ids), jnp.int32)
    return StepInput(
        tokens=ids,
        token_slots=jnp.full_like(positions, -1),
        positions=positions,
        page_ids=pages[positions // BLOCK_SIZE],
        logits_tokens=positions[-1:],
        query_start=jnp.concatenate([jnp.zeros_like(count), count]),
        context_lens=count,
        block_tables=pages[None],
        sampling=jnp.zeros((1, 1), jnp.int32),
    )
