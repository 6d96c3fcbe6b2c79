"""Medusa heads from what is named to what guesses: opened, checked against the model, sized and loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxinfer.checkpoint.medusa_heads import read_medusa, read_medusa_config
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.medusa import MedusaConfig, config_of_medusa, medusa_shapes
from jaxinfer.runner.medusa_runner import MedusaRunner
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.speculation.candidate_tree import Choices
from jaxinfer.speculation.medusa import MedusaProposer
from jaxinfer.startup.args import EngineArgs
from jaxinfer.startup.guesser import guesser_path
from jaxinfer.startup.live_params import match_tree
from jaxinfer.startup.resting_weights import RestingWeights
from jaxinfer.startup.speculation_options import SpeculativeOptions
from jaxinfer.typing import Params

MOST_CANDIDATES = 10
"""Guesses of a head that trees are made of, at most; as many as the public trees use."""


@dataclass(frozen=True)
class Medusa:
    """Heads before their weights are read (a `Guesser`).

    Attributes:
        heads: their sizes.
        folder: where they lie; None for live parameters.
        params: the latter.
        num_candidates: guesses of each head that are used.
        depth: heads that are used.
    """

    heads: MedusaConfig
    folder: Path | None
    params: Params | None
    num_candidates: int
    depth: int

    def weight_bytes(self, dtype: str) -> int:
        """See `Guesser`."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(medusa_shapes(self.heads, dtype)))

    def block_bytes(self, block_size: int, kv_dtype: str) -> int:
        """See `Guesser`: the features they read are in the target's pool."""
        return 0

    def tree_depth(self, num_tokens: int) -> int:
        """See `Guesser`: a head for each place."""
        return min(self.depth, num_tokens)

    def step_bytes(self, vocab_size: int, num_running: int, num_tokens: int) -> int:
        """See `Guesser`: logits of all heads, twice while the best are looked for."""
        return 2 * 4 * num_running * self.heads.num_heads * vocab_size

    def load(self, dtype: str) -> Params:
        """Their parameters, in the dtype of the activations."""
        if self.folder is None:
            return match_tree(self.params, medusa_shapes(self.heads, dtype))
        _, params = read_medusa(self.folder, self.heads.vocab_size)
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)


def open_medusa(args: EngineArgs, options: SpeculativeOptions, target: ModelConfig) -> Medusa:
    """The heads that the options name, checked against the target.

    Args:
        args: settings of the engine.
        options: with the method "medusa".
        target: the target's architecture.

    Raises:
        ValueError: there are no such heads, they belong to a model of other sizes, or the trees asked for are deeper
            than there are heads.
        ConnectionError: they have to be downloaded and the network does not answer.
    """
    folder = None
    if options.model is not None:
        folder = guesser_path(args, options)
        if not folder.is_dir():
            raise ValueError(f"speculative model={str(options.model)!r} is a file; Medusa heads are a folder")
        heads = read_medusa_config(folder, target.vocab_size)
    else:
        if not isinstance(options.params, Mapping):
            raise TypeError(f"params of Medusa heads is {type(options.params).__name__}, not a mapping")
        heads = config_of_medusa(options.params, target.vocab_size)
    _check_sizes(heads, target)
    if options.choices is None:
        used, depth = min(options.max_tokens, MOST_CANDIDATES, target.vocab_size), heads.num_heads
    else:
        used, depth = _used_by(options.choices, heads)
    return Medusa(heads, folder, options.params, used, depth)


def _used_by(choices: Choices, heads: MedusaConfig) -> tuple[int, int]:
    """Candidates and heads that a tree's shape uses."""
    used, depth = 1 + max(max(path) for path in choices), max(map(len, choices))
    if depth > heads.num_heads:
        raise ValueError(
            f"medusa_choices has a path of {depth} nodes and there are {heads.num_heads} heads; shorten it"
        )
    if used > heads.vocab_size:
        raise ValueError(f"medusa_choices has the candidate {used - 1} and the vocabulary {heads.vocab_size} ids")
    return used, depth


def make_medusa(
    opened: Medusa, options: SpeculativeOptions, runner: ModelRunner
) -> tuple[MedusaProposer, RestingWeights]:
    """The method, and its weights, which are read."""
    config = runner.config
    params = opened.load(config.runner.dtype)
    heads = MedusaRunner(runner, opened.heads, params, opened.num_candidates)
    reload = None if opened.folder is None else partial(opened.load, config.runner.dtype)
    proposer = MedusaProposer(heads, config.cache.block_size, options.choices)
    return proposer, RestingWeights(heads, jax.tree.structure(params), reload)


def _check_sizes(heads: MedusaConfig, target: ModelConfig) -> None:
    for name, size, own in (
        ("hidden_size", heads.hidden_size, target.hidden_size),
        ("vocab_size", heads.vocab_size, target.vocab_size),
    ):
        if size != own:
            raise ValueError(
                f"the Medusa heads do not belong to the model: their {name} is {size} and the model's is {own}; use "
                "heads that were trained on it"
            )
