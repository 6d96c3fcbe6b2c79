"""What an EAGLE head guesses, computed over whole sequences without any cache, and the tree search in plain Python."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.eagle import EagleHead
from jaxinfer.models.eagle3 import Eagle3Config, Eagle3Head
from jaxinfer.models.sequence import SequenceAttention, SequenceDecoder

LENGTH = 64


class NaiveEagle:
    """A target and a head over sequences of at most `LENGTH` tokens.

    Args:
        target, params: of the model.
        head: of the head, see `EagleModel.head`; `head_params`: of its module.
        token_ids: the tokens that it guesses among; None for all.
    """

    def __init__(
        self,
        target: ModelConfig,
        params: Any,
        head: ModelConfig | Eagle3Config,
        head_params: Any,
        token_ids: Sequence[int] | None = None,
    ) -> None:
        self.target, self.params = target, jax.tree.map(jnp.asarray, params)
        self.head, self.head_params = head, jax.tree.map(jnp.asarray, head_params)
        self.token_ids = np.arange(target.vocab_size) if token_ids is None else np.asarray(token_ids)
        self._run = jax.jit(self._outputs)
        self._feature = jax.jit(self._features)

    def features(self, ids: Sequence[int]) -> np.ndarray:
        """[L, D] of the target's tokens."""
        return np.asarray(self._feature(self._padded(ids)))[: len(ids)]

    def after(self, ids: Sequence[int], guessed: Sequence[np.ndarray] = ()) -> tuple[np.ndarray, np.ndarray]:
        """The guessed feature at the last token, and the log-probabilities [V] of what follows.

        Args:
            ids: known tokens, and those of a path behind them.
            guessed: features guessed at the last known token and along the path, but for the path's last.
        """
        known = len(ids) - len(guessed)
        given = np.zeros((LENGTH, self.features(ids[:1]).shape[1]), np.float32)
        given[1:known] = self.features(ids[: known - 1]) if known > 1 else 0
        for place, feature in enumerate(guessed):
            given[known + place] = feature
        out, logits = self._run(jnp.asarray(given), self._padded(ids))
        last = np.asarray(logits[len(ids) - 1], np.float64)
        logprobs = np.full(self.target.vocab_size, -np.inf)
        logprobs[self.token_ids] = last - np.log(np.exp(last - last.max()).sum()) - last.max()
        return np.asarray(out[len(ids) - 1]), logprobs

    def tree(self, ids: Sequence[int], depth: int, top_k: int, num_nodes: int) -> list[tuple[int, int, float]]:
        """Token, parent and log-probability of the best nodes, best first."""
        root, logprobs = self.after(ids)
        nodes: list[tuple[tuple[int, ...], float]] = []
        frontier: list[tuple[tuple[int, ...], float, list[np.ndarray]]] = []
        for token in np.argsort(-logprobs, kind="stable")[:top_k].tolist():
            nodes.append(((token,), logprobs[token]))
            frontier.append(((token,), logprobs[token], [root]))
        for _ in range(depth - 1):
            grown = []
            for path, score, guessed in frontier:
                feature, logprobs = self.after([*ids, *path], guessed)
                for token in np.argsort(-logprobs, kind="stable")[:top_k].tolist():
                    grown.append(((*path, token), score + logprobs[token], [*guessed, feature]))
            nodes += [(path, score) for path, score, _ in grown]
            frontier = sorted(grown, key=lambda node: -node[1])[:top_k]
        best = sorted(nodes, key=lambda node: -node[1])[:num_nodes]
        places = {path: place for place, (path, _) in enumerate(best)} | {(): -1}
        return [(path[-1], places[path[:-1]], score) for path, score in best]

    def _features(self, ids: jax.Array) -> jax.Array:
        whole = SequenceDecoder(self.target)
        states = [whole.embed(self.params, ids)]
        for index in range(self.target.num_hidden_layers):
            states.append(whole.layer(index, self.params[f"layers_{index}"], states[-1]))
        if isinstance(self.head, Eagle3Config):
            taps = [states[tap][0] for tap in self.head.taps]
            return Eagle3Head(self.head).apply({"params": self.head_params}, taps, method=Eagle3Head.fuse)
        return Decoder(self.target).apply({"params": self.params}, states[-1][0], method=Decoder.normed)

    def _outputs(self, given: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        positions, attend = jnp.arange(LENGTH), SequenceAttention(None, 1)
        variables = {"params": self.head_params}
        embedded = Decoder(self.target).apply({"params": self.params}, ids[0], positions, method=Decoder.embedded)
        if isinstance(self.head, Eagle3Config):
            module: Any = Eagle3Head(self.head)
            out, _ = module.apply(variables, given, embedded, positions, attend, [None])
            return out, module.apply(variables, out, method=Eagle3Head.logits)
        out, _ = EagleHead(self.head).apply(variables, given, embedded, positions, attend, [None])
        logits = Decoder(self.target).apply({"params": self.params}, out, method=Decoder.logits)
        return out, logits[:, self.token_ids]

    def _padded(self, ids: Sequence[int]) -> jax.Array:
        padded = np.zeros((1, LENGTH), np.int32)  # what follows a token does not matter to it
        padded[0, : len(ids)] = ids
        return jnp.asarray(padded)
