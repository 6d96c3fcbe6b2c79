"""The EAGLE draft loop: a tree of guesses behind each request, grown in one program (arXiv:2406.16858)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache.paged import KVCache, LayerCache, read_features
from jaxinfer.config import EagleTree
from jaxinfer.models.eagle_model import EagleModel
from jaxinfer.runner.step import attention_over
from jaxinfer.sampling.best_rows import best_of_rows


class LoopInput(NamedTuple):
    """What the program reads, as views of one array.

    Attributes:
        tokens: int32[B], each request's last token, which the model has not computed.
        context_lens: int32[B], tokens up to and including that; 1 for padding rows.
        block_tables: int32[B, M], pages of these, and of the slots that the loop writes; 0 for padding.
    """

    tokens: jax.Array
    context_lens: jax.Array
    block_tables: jax.Array

    @classmethod
    def unpack(cls, packed: Any, num_rows: int, table_width: int) -> "LoopInput":
        """Views of ``packed[num_rows * (2 + table_width)]``; works on numpy and under jit."""
        tokens, lengths = packed[:num_rows], packed[num_rows : 2 * num_rows]
        return cls(tokens, lengths, packed[2 * num_rows :].reshape(num_rows, table_width))


class LoopOutput(NamedTuple):
    """int32[B, 3, N]: of each node, best first, its token, its parent among them (-1 for the root), and the logarithm
    of its probability as the bits of a float32; and the pool."""

    packed: jax.Array
    kv: KVCache


class _Frontier(NamedTuple):
    """The K nodes of a depth that go on, of each of B requests.

    Attributes:
        tokens: int32[B, K].
        scores: float32[B, K], logarithms of their probabilities.
        candidates: int32[B, K], their place among all candidates.
        features: [B, K, D], guessed for the node before each.
        sees: bool[B, K, S], which of the S slots behind the root are on the way to it.
    """

    tokens: jax.Array
    scores: jax.Array
    candidates: jax.Array
    features: jax.Array
    sees: jax.Array


class _Children(NamedTuple):
    """Candidates, ``[B, C]``: tokens, scores, and the places of their parents among all candidates (-1: the root)."""

    tokens: jax.Array
    scores: jax.Array
    parents: jax.Array


def make_eagle_loop(
    model: EagleModel, trees: tuple[Any, Any], shape: EagleTree, *, num_rows: int, table_width: int, block_size: int
) -> Callable[..., LoopOutput]:
    """The program of one batch size: ``(leaves, kv, packed) -> LoopOutput``, jitted with kv donated.

    Each request begins with its root: the feature of the token before its last one, which is in the pool, and its last
    token. Then `depth - 1` times the best K nodes of a depth go through the head together; their keys and values are
    written behind the root's.

    Args:
        model: head and target.
        trees: treedefs of the head's parameters and of the target's token parameters; `leaves` are first those of the
            one, then those of the other.
        shape: of the tree.
        num_rows: B.
        table_width: M.
        block_size: S.
    """
    head_tree, token_tree = trees

    def eagle_loop(leaves: tuple[jax.Array, ...], kv: KVCache, packed: jax.Array) -> LoopOutput:
        split = head_tree.num_leaves
        params = jax.tree.unflatten(head_tree, leaves[:split]), jax.tree.unflatten(token_tree, leaves[split:])
        given = LoopInput.unpack(packed, num_rows, table_width)
        loop = _Loop(model, params, given, shape, block_size)
        layer = kv.layers[-1]
        guessed, layer = loop.root(kv, layer)
        children = loop.children(guessed[:, None], jnp.zeros((num_rows, 1)), jnp.full((num_rows, 1), -1))
        found = [children]
        frontier = loop.first(children, guessed)
        for depth in range(1, shape.depth):
            guessed, layer = loop.grow(frontier, depth, layer)
            children = loop.children(guessed, frontier.scores, frontier.candidates)
            first = sum(part.tokens.shape[1] for part in found)
            found.append(children)
            if depth + 1 < shape.depth:
                frontier = loop.next(children, first, guessed, frontier)
        candidates = _Children(*(jnp.concatenate(parts, axis=1) for parts in zip(*found, strict=True)))
        return LoopOutput(_best(candidates, shape.num_kept), kv._replace(layers=(*kv.layers[:-1], layer)))

    return eagle_loop


@dataclass(frozen=True)
class _Loop:
    """The steps of one run."""

    model: EagleModel
    params: tuple[Any, Any]
    given: LoopInput
    shape: EagleTree
    block_size: int

    def root(self, kv: KVCache, layer: LayerCache) -> tuple[jax.Array, LayerCache]:
        """Guessed features [B, D] of the roots."""
        slots = self.given.context_lens - 1
        before = jnp.maximum(slots - 1, 0)
        pages = self._pages(before[:, None])[:, 0]
        features = jnp.where((slots > 0)[:, None], read_features(kv, pages, before % self.block_size), 0)
        return self._guess(features, self.given.tokens[:, None], slots[:, None], slots, None, layer)

    def first(self, children: _Children, guessed: jax.Array) -> _Frontier:
        """All children of the root."""
        rows, count = children.tokens.shape
        places = jnp.broadcast_to(jnp.arange(count), (rows, count))
        features = jnp.broadcast_to(guessed[:, None], (rows, count, guessed.shape[1]))
        sees = jnp.broadcast_to(jnp.eye(count, dtype=bool), (rows, count, count))
        return _Frontier(children.tokens, children.scores, places, features, sees)

    def grow(self, frontier: _Frontier, depth: int, layer: LayerCache) -> tuple[jax.Array, LayerCache]:
        """Guessed features [B, K, D] of the nodes of a depth."""
        rows, count = frontier.tokens.shape
        first = self.given.context_lens[:, None] + (depth - 1) * count
        slots = first + jnp.arange(count)
        positions = jnp.broadcast_to((self.given.context_lens - 1 + depth)[:, None], (rows, count))
        features = frontier.features.reshape(rows * count, -1)
        sees = None if count == 1 else frontier.sees
        guessed, layer = self._guess(features, frontier.tokens, slots, positions.reshape(-1), sees, layer)
        return guessed.reshape(rows, count, -1), layer

    def children(self, guessed: jax.Array, scores: jax.Array, places: jax.Array) -> _Children:
        """The K most likely children of each of F nodes, [B, F K].

        Args:
            guessed: [B, F, D], features of the nodes.
            scores, places: [B, F], of the nodes.
        """
        rows, count = scores.shape
        logits = self.model.logits(*self.params, guessed.reshape(rows * count, -1))
        best, guesses = best_of_rows(logits, self.shape.top_k)
        logprobs = best - jax.nn.logsumexp(logits, axis=1, keepdims=True)
        # Neither rounding nor what is no number must make a child likelier than its parent.
        logprobs = jnp.where(jnp.isnan(logprobs), -jnp.inf, jnp.minimum(logprobs, 0.0))
        tokens = self.model.tokens(self.params[0], guesses)
        total = scores[:, :, None] + logprobs.reshape(rows, count, -1)
        parents = jnp.broadcast_to(places[:, :, None], total.shape)
        return _Children(tokens.reshape(rows, -1), total.reshape(rows, -1), parents.reshape(rows, -1))

    def next(self, children: _Children, first: int, guessed: jax.Array, before: _Frontier) -> _Frontier:
        """The K best of the children, which are the candidates from number `first` on."""
        count = self.shape.top_k
        scores, chosen = lax.top_k(children.scores, count)
        parents = chosen // count
        tokens = jnp.take_along_axis(children.tokens, chosen, axis=1)
        features = jnp.take_along_axis(guessed, parents[:, :, None], axis=1)
        sees = jnp.take_along_axis(before.sees, parents[:, :, None], axis=1)
        own = jnp.broadcast_to(jnp.eye(count, dtype=bool), (tokens.shape[0], count, count))
        return _Frontier(tokens, scores, first + chosen, features, jnp.concatenate([sees, own], axis=2))

    def _guess(
        self,
        features: jax.Array,
        tokens: jax.Array,
        slots: jax.Array,
        positions: jax.Array,
        sees: jax.Array | None,
        layer: LayerCache,
    ) -> tuple[jax.Array, LayerCache]:
        """Features [B K, D] of K tokens of each request, which are the last in `slots[B, K]`."""
        rows, count = slots.shape
        new = count if sees is None else sees.shape[2]
        paged = attention_over(
            self.model.layer,
            page_ids=self._pages(slots).reshape(-1),
            offsets=(slots % self.block_size).reshape(-1),
            block_tables=self.given.block_tables,
            query_start=jnp.arange(rows + 1, dtype=jnp.int32) * new,
            context_lens=slots[:, -1] + 1,
            num_tokens=rows * new,
            tree_mask=None if sees is None else jnp.pad(sees, ((0, 0), (new - count, 0), (0, 0))).reshape(-1, new),
            num_before=new - count,
        )
        return self.model.guess(*self.params, features, tokens.reshape(-1), positions, paged, layer)

    def _pages(self, slots: jax.Array) -> jax.Array:
        """int32 of the slots' shape [B, K]."""
        return jnp.take_along_axis(self.given.block_tables, slots // self.block_size, axis=1)


def _best(candidates: _Children, count: int) -> jax.Array:
    """int32[B, 3, N], see `LoopOutput`. Parents come before their children: they are at least as likely, and before
    them among the candidates."""
    scores, chosen = lax.top_k(candidates.scores, count)
    tokens, parents = (jnp.take_along_axis(field, chosen, axis=1) for field in (candidates.tokens, candidates.parents))
    is_parent = parents[:, :, None] == chosen[:, None, :]
    places = jnp.where(parents < 0, -1, jnp.argmax(is_parent, axis=2))
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    return jnp.stack([tokens.astype(jnp.int32), places.astype(jnp.int32), bits], axis=1)
