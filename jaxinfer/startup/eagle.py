"""An EAGLE head from what is named to what guesses: opened, checked against the model, sized and loaded."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint.eagle3_head import is_eagle3, read_eagle3, read_eagle3_config
from jaxinfer.checkpoint.eagle_head import read_eagle, read_eagle_config
from jaxinfer.config import EagleTree
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eagle import init_eagle
from jaxinfer.models.eagle3 import Eagle3Config, init_eagle3
from jaxinfer.models.eagle_model import CUT_HEAD, TOKEN_IDS, EagleModel, cut_head
from jaxinfer.runner.eagle_runner import EagleRunner
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.speculation.eagle import EagleProposer
from jaxinfer.startup.args import EngineArgs
from jaxinfer.startup.guesser import guesser_path
from jaxinfer.startup.resting_weights import RestingWeights
from jaxinfer.startup.speculation_options import SpeculativeOptions
from jaxinfer.typing import Params


@dataclass(frozen=True)
class Eagle:
    """A head before its weights are read (a `Guesser`).

    Attributes:
        model: the head and what it guesses for.
        tree: what is guessed.
        folder: where it lies.
        token_ids: tokens that a head of version 1 or 2 guesses among, ascending; None for all.
    """

    model: EagleModel
    tree: EagleTree
    folder: Path
    token_ids: tuple[int, ...] | None

    def weight_bytes(self, dtype: str) -> int:
        """See `Guesser`."""
        head = self.model.head
        if isinstance(head, Eagle3Config):
            shapes = jax.eval_shape(lambda: init_eagle3(head, jax.random.key(0)))
        else:
            shapes = jax.eval_shape(lambda: init_eagle(head, jax.random.key(0), use_bias=self.model.use_bias))
        count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        return (count + len(self.token_ids or ()) * self.model.target.hidden_size) * jnp.dtype(dtype).itemsize

    def block_bytes(self, block_size: int, kv_dtype: str) -> int:
        """See `Guesser`: its keys and values, and the features it reads, are in the target's pool."""
        return 0

    def step_bytes(self, vocab_size: int, num_running: int, num_tokens: int) -> int:
        """See `Guesser`: logits of the nodes of a depth, twice while the best are looked for."""
        among = self.model.head.draft_vocab_size if isinstance(self.model.head, Eagle3Config) else vocab_size
        return 2 * 4 * num_running * self.tree.top_k * len(self.token_ids or range(among))

    def tree_depth(self, num_tokens: int) -> int:
        """See `Guesser`."""
        return 0 if self.tree.top_k == 1 else min(self.tree.depth, num_tokens)

    def load(self, dtype: str, token_params: Params) -> Params:
        """Its parameters as `EagleModel` takes them, in the dtype of the activations."""
        ids: Any = self.token_ids
        if isinstance(self.model.head, Eagle3Config):
            found = read_eagle3(self.folder, self.model.target.num_hidden_layers)
            head, ids = found.params, found.token_ids
        else:
            _, head, _ = read_eagle(self.folder)
        params: dict[str, Any] = {"head": jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), head)}
        if ids is None:
            return params
        params[TOKEN_IDS] = jnp.asarray(ids, jnp.int32)
        if not isinstance(self.model.head, Eagle3Config):
            params[CUT_HEAD] = cut_head(self.model.target, token_params, params[TOKEN_IDS], jnp.dtype(dtype))
        return params


def open_eagle(args: EngineArgs, options: SpeculativeOptions, target: ModelConfig) -> Eagle:
    """The head that the options name, checked against the target.

    Args:
        args: settings of the engine.
        options: with the method "eagle" or "eagle3".
        target: the target's architecture.

    Raises:
        ValueError: there is no such head, it belongs to a model of other sizes, or is of another version than the
            method.
        ConnectionError: it has to be downloaded and the network does not answer.
    """
    folder = guesser_path(args, options)
    if not folder.is_dir():
        raise ValueError(f"speculative model={str(options.model)!r} is a file; an EAGLE head is a folder")
    if is_eagle3(folder) != (options.method == "eagle3"):
        other = "eagle3" if options.method == "eagle" else "eagle"
        raise ValueError(f"{folder} holds a head of the speculative method {other!r}, not {options.method!r}")
    ids = None
    if options.method == "eagle3":
        head = read_eagle3_config(folder, target.num_hidden_layers)
        _check_sizes(head.layer, head.target_hidden_size, target)
        model = EagleModel(target, replace(head, layer=_fitted(head.layer, target, args)))
    else:
        layer, use_bias = read_eagle_config(folder)
        _check_sizes(layer, layer.hidden_size, target)
        model = EagleModel(target, _fitted(layer, target, args), use_bias)
        ids = _token_ids(options.draft_vocab, target.vocab_size)
    among = head.draft_vocab_size if options.method == "eagle3" else len(ids or range(target.vocab_size))
    nodes = options.max_tokens
    top_k = min(options.eagle_topk or 1, among)
    depth = options.eagle_depth or (nodes if top_k == 1 else min(nodes, DEFAULT_DEPTH))
    return Eagle(model, EagleTree(model.layer, depth, top_k, nodes), folder, ids)


DEFAULT_DEPTH = 5
"""Of trees: few branches are right further ahead."""


def make_eagle(opened: Eagle, runner: ModelRunner) -> tuple[EagleProposer, RestingWeights]:
    """The method, and its weights, which are read."""
    dtype = runner.config.runner.dtype
    params = opened.load(dtype, runner.token_params)
    runner.use_eagle(opened.model, params)
    loop = EagleRunner(runner, opened.tree)
    rest = RestingWeights(loop, jax.tree.structure(params), lambda: opened.load(dtype, runner.token_params))
    return EagleProposer(loop, is_chain=opened.tree.top_k == 1), rest


def _fitted(layer: ModelConfig, target: ModelConfig, args: EngineArgs) -> ModelConfig:
    """The layer as it runs beside this target: it sees as far back as the target keeps blocks."""
    if target.widest_window is not None:
        layer = replace(layer, sliding_window=target.widest_window)
    if layer.rope_scaling is not None and layer.rope_scaling.depends_on_length and not layer.rope_length:
        longest = args.max_model_len or target.max_position_embeddings
        layer = replace(layer, rope_length=min(longest, layer.max_position_embeddings))
    return layer


def _check_sizes(layer: ModelConfig, hidden_size: int, target: ModelConfig) -> None:
    sizes = {"hidden_size": (hidden_size, target.hidden_size), "vocab_size": (layer.vocab_size, target.vocab_size)}
    for name, (size, own) in sizes.items():
        if size != own:
            raise ValueError(
                f"the EAGLE head does not belong to the model: its {name} is {size} and the model's is {own}; use a "
                "head that was trained on it"
            )


def _token_ids(wanted: int | str | Path | Sequence[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    """`draft_vocab` as ascending ids.

    Raises:
        ValueError: not ids of the vocabulary.
    """
    if wanted is None:
        return None
    given = repr(wanted)
    refusal = f"draft_vocab={given if len(given) <= 80 else given[:77] + '...'}"
    advice = (
        f"it must be ids from 0 to below {vocab_size}, a JSON file with a list of such, or how many of the first ones"
    )
    try:
        ids: Any = json.loads(Path(wanted).read_text()) if isinstance(wanted, str | Path) else wanted
        if isinstance(ids, int) and not isinstance(ids, bool):
            ids = range(min(ids, vocab_size + 1))
        found = np.unique(np.asarray(list(ids)))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{refusal}: {error}; {advice}") from error
    if not found.size or found.dtype.kind not in "iu" or found[0] < 0 or found[-1] >= vocab_size:
        raise ValueError(f"{refusal}: {advice}")
    return tuple(found.tolist())
