"""A draft model from what is named to what guesses: opened, checked against the target, sized and loaded."""

from dataclasses import dataclass, replace
from functools import partial

import jax

from jaxinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.checkpoint.load import load_params
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes
from jaxinfer.planning.memory import kv_block_bytes
from jaxinfer.quant.plan import QuantPlan
from jaxinfer.runner.draft_runner import DraftRunner
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.speculation.draft_model import DraftModelProposer
from jaxinfer.startup.args import EngineArgs
from jaxinfer.startup.guesser import guesser_path
from jaxinfer.startup.live_params import match_params
from jaxinfer.startup.quantization import checked_options, named_method, quant_plan
from jaxinfer.startup.resting_weights import RestingWeights
from jaxinfer.startup.speculation_options import SpeculativeOptions
from jaxinfer.startup.vocabularies import check_vocabularies
from jaxinfer.tokenizers.tokenizer import Tokenizer
from jaxinfer.typing import Params


@dataclass(frozen=True)
class DraftModel:
    """A draft model before its weights are read (a `Guesser`).

    Attributes:
        model: its architecture.
        checkpoint: where its weights come from; None for live parameters.
        params: the latter.
        plan: which of them are quantised, and how.
    """

    model: ModelConfig
    checkpoint: Checkpoint | None
    params: Params | None
    plan: QuantPlan | None

    def weight_bytes(self, dtype: str) -> int:
        """See `Guesser`."""
        leaves = jax.tree.leaves(param_shapes(self.model, dtype, self.plan))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    def block_bytes(self, block_size: int, kv_dtype: str) -> int:
        """See `Guesser`."""
        return kv_block_bytes(self.model, block_size, kv_dtype)

    def tree_depth(self, num_tokens: int) -> int:
        """See `Guesser`."""
        return 0

    def step_bytes(self, vocab_size: int, num_running: int, num_tokens: int) -> int:
        """See `Guesser`: the distributions that the drafts of a step were drawn from."""
        return 4 * num_running * num_tokens * vocab_size

    def load(self, dtype: str, progress: bool) -> Params:
        """Its parameters."""
        if self.params is not None:
            return match_params(self.params, self.model, dtype, self.plan)
        assert self.checkpoint is not None
        return load_params(self.checkpoint, dtype, plan=self.plan, progress=progress)


def open_draft(
    args: EngineArgs,
    options: SpeculativeOptions,
    target: ModelConfig,
    source: Checkpoint | None,
    tokenizer: Tokenizer | None,
) -> DraftModel:
    """The draft model that the options name, checked against the target.

    Args:
        args: settings of the engine.
        options: with the method "draft_model".
        target: the target's architecture.
        source: its checkpoint; None for live parameters.
        tokenizer: that of the engine, which is the target's own where it has no checkpoint.

    Raises:
        ValueError: there is no such model, its vocabulary is another, or it needs keys and values that the target's
            pool lets go of.
        ConnectionError: it has to be downloaded and the network does not answer.
    """
    checkpoint = None
    if options.model is not None:
        checkpoint = open_checkpoint(guesser_path(args, options))
    model = options.model_config if checkpoint is None else checkpoint.model_config
    if not isinstance(model, ModelConfig):
        raise TypeError(f"model_config={model!r} of the draft model must be a jaxinfer.ModelConfig")
    owns = tokenizer if source is None else _own_tokenizer(source, args), _own_tokenizer(checkpoint, args)
    check_vocabularies(*owns, (target.vocab_size, model.vocab_size))
    _check_windows(target, model)
    method = named_method(options.quantization)
    choice = checked_options(method, options.quantization_config)
    plan = quant_plan(method, choice, model, checkpoint, jax.default_backend())
    return DraftModel(model, checkpoint, options.params, plan)


def _own_tokenizer(checkpoint: Checkpoint | None, args: EngineArgs) -> Tokenizer | None:
    """The one in a checkpoint; None where there is no checkpoint, or none in it and the engine needs none either."""
    if checkpoint is None:
        return None
    try:
        return checkpoint.tokenizer()
    except ValueError:
        if args.skip_tokenizer_init:
            return None
        raise


def _check_windows(target: ModelConfig, draft: ModelConfig) -> None:
    """Blocks that no layer of the target sees are given away, with the draft's keys and values in them."""
    window, own = target.widest_window, draft.widest_window
    if window is not None and (own is None or own > window):
        seen = "all positions" if own is None else f"{own} positions"
        raise ValueError(
            f"the draft model sees {seen} and the target the last {window} only; use a draft with such a window, or "
            "speculative method 'ngram'"
        )


def make_draft(opened: DraftModel, runner: ModelRunner, progress: bool) -> tuple[DraftModelProposer, RestingWeights]:
    """The method, and its weights, which are read.

    Args:
        opened: the draft model.
        runner: of the target, which verifies.
        progress: show a bar.
    """
    config, model = runner.config, opened.model
    scheduler = config.scheduler
    if model.rope_scaling is not None and model.rope_scaling.depends_on_length and not model.rope_length:
        model = replace(model, rope_length=min(scheduler.max_model_len, model.max_position_embeddings))
    params = opened.load(config.runner.dtype, progress)
    steps = DraftRunner(replace(config, model=model), params, config.model.vocab_size, runner.placement)
    runner.drafted = lambda: steps.drafted
    sizes = config.cache.block_size, scheduler.max_num_batched_tokens, model.max_position_embeddings
    reload = None if opened.checkpoint is None else partial(opened.load, config.runner.dtype, progress)
    return DraftModelProposer(steps, *sizes), RestingWeights(steps, jax.tree.structure(params), reload)
