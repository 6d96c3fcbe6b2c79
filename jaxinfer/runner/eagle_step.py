"""EagleStep: what a step does for an EAGLE head, so that the head has seen every token that the model has computed."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.cache.paged import KVCache, LayerCache, read_features, write_features
from jaxinfer.models.attention import Sight
from jaxinfer.models.eagle_model import EagleModel
from jaxinfer.models.rope import Rotation
from jaxinfer.runner.inputs import StepInput
from jaxinfer.typing import Params


class EagleHead(NamedTuple):
    """A head with its parameters: see `EagleModel`."""

    model: EagleModel
    params: Params


@dataclass(frozen=True)
class EagleStep:
    """Keeps the features of a step's tokens, and writes their keys and values in the head's layer.

    The entry of a token comes from the feature of the token before it, which lies in the pool or was computed in the
    same step, and of itself; it has the token's slot and position. The first token of a sequence has a feature of
    zeros.

    Attributes:
        model: head and target.
        tree: treedef of the head's parameters.
        block_size: S.
    """

    model: EagleModel
    tree: Any
    block_size: int

    def __call__(
        self,
        leaves: tuple[jax.Array, ...],
        token_params: Params,
        step: StepInput,
        attention: Any,
        states: tuple[jax.Array, list[jax.Array]],
        kv: KVCache,
    ) -> KVCache:
        """The pool with the step's tokens.

        Args:
            leaves: of the head's parameters.
            token_params: of the target, see `EagleModel`.
            step: with the tokens' ids.
            attention: of the step; says where keys and values are written.
            states: hidden states after the last norm, and those at `EagleModel.taps`.
            kv: the pool with keys and values of the target's layers.
        """
        params = jax.tree.unflatten(self.tree, leaves)
        kv = write_features(kv, attention.page_ids, attention.offsets, self.model.features(params, *states))
        rows, before = _slots_before(step, attention.tree_mask)
        pages = step.block_tables[rows, jnp.maximum(before, 0) // self.block_size]
        features = read_features(kv, pages, jnp.maximum(before, 0) % self.block_size)
        features = jnp.where((before < 0)[:, None], 0, features)
        given = features, step.tokens, step.positions, _Writing(attention), kv.layers[-1]
        _, layer = self.model.guess(params, token_params, *given)
        return kv._replace(layers=(*kv.layers[:-1], layer))


def _slots_before(step: StepInput, tree_mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """int32[T] each: the row of each token, and the slot in it of the token before, which in a tree is the last other
    one that it sees; -1 before the first token of a sequence. Of padding some row and slot."""
    token = jnp.arange(step.tokens.shape[0])
    # Not by `jnp.searchsorted`, whose loop would cut the step's CUDA graph in three.
    rows = jnp.sum(step.query_start[1:] <= token[:, None], axis=1)
    rows = jnp.minimum(rows, step.context_lens.shape[0] - 1)
    first, new = step.query_start[rows], step.query_start[rows + 1] - step.query_start[rows]
    index = token - first
    before = index - 1
    if tree_mask is not None:
        column = jnp.arange(tree_mask.shape[1])
        seen = jnp.where(tree_mask & (column < index[:, None]), column, -1).max(axis=1)
        before = jnp.where(new <= tree_mask.shape[1], seen, before)
    return rows, step.context_lens[rows] - new + before


@dataclass(frozen=True)
class _Writing:
    """An `AttentionFn` that writes keys and values, and looks at none: nobody asks for what the head would guess."""

    attention: Any

    def __call__(
        self, qkv: jax.Array, angles: Rotation, cache: LayerCache, sight: Sight
    ) -> tuple[jax.Array, LayerCache]:
        queries, cache = self.attention.write(qkv, angles, cache)
        return jnp.zeros_like(queries), cache
