"""From speculative options to the engine's Speculation: the draft model opened, sized, checked and loaded."""

from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxinfer.cache_dir import default_cache_dir
from jaxinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.checkpoint.load import load_params
from jaxinfer.checkpoint.resolve import resolve_model
from jaxinfer.config import EngineConfig, SpeculationConfig
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes
from jaxinfer.planning.memory import kv_block_bytes
from jaxinfer.quant.plan import QuantPlan
from jaxinfer.runner.draft_runner import DraftRunner
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.speculation.draft_model import DraftModelProposer
from jaxinfer.speculation.ngram import NgramProposer
from jaxinfer.speculation.proposer import Proposer
from jaxinfer.speculation.speculator import Speculator
from jaxinfer.startup.args import EngineArgs
from jaxinfer.startup.live_params import match_params
from jaxinfer.startup.quantization import checked_options, named_method, quant_plan
from jaxinfer.startup.speculation_options import SpeculativeOptions
from jaxinfer.startup.vocabularies import check_vocabularies
from jaxinfer.tokenizers.tokenizer import Tokenizer
from jaxinfer.typing import Params

TOKENS_OF_A_CPU_STEP, TOKENS_OF_A_GPU_STEP = 64, 256
"""Up to here a step's time is about that of reading the weights: on a CPU of few cores, and on GPUs, whose tensor
cores do 150 to 250 multiplications for each byte of 16-bit weights."""


@dataclass(frozen=True)
class DraftModel:
    """A draft model before its weights are read.

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
        """Bytes of its parameters on the device."""
        leaves = jax.tree.leaves(param_shapes(self.model, dtype, self.plan))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    def block_bytes(self, block_size: int, kv_dtype: str) -> int:
        """Bytes of a block in its pool."""
        return kv_block_bytes(self.model, block_size, kv_dtype)

    def load(self, dtype: str, progress: bool) -> Params:
        """Its parameters."""
        if self.params is not None:
            return match_params(self.params, self.model, dtype, self.plan)
        assert self.checkpoint is not None
        return load_params(self.checkpoint, dtype, plan=self.plan, progress=progress)


def open_draft(
    args: EngineArgs,
    options: SpeculativeOptions | None,
    target: ModelConfig,
    source: Checkpoint | None,
    tokenizer: Tokenizer | None,
) -> DraftModel | None:
    """The draft model that the options name, checked against the target; None where they name none.

    Args:
        args: settings of the engine.
        options: of the speculation; None for none.
        target: the target's architecture.
        source: its checkpoint; None for live parameters.
        tokenizer: that of the engine, which is the target's own where it has no checkpoint.

    Raises:
        ValueError: there is no such model, its vocabulary is another, or it needs keys and values that the target's
            pool lets go of.
        ConnectionError: it has to be downloaded and the network does not answer.
    """
    if options is None or options.method != "draft_model":
        return None
    checkpoint = None
    if options.model is not None:
        token = None if args.hf_token is True else args.hf_token
        path = resolve_model(options.model, revision=options.revision, token=token, cache_dir=default_cache_dir())
        checkpoint = open_checkpoint(path)
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


def speculation_config(options: SpeculativeOptions | None, platform: str) -> SpeculationConfig | None:
    """What the engine needs to know of it.

    Args:
        options: None for no speculation.
        platform: JAX's name of the device's platform.
    """
    if options is None:
        return None
    tokens = options.max_tokens
    step = TOKENS_OF_A_CPU_STEP if platform == "cpu" else TOKENS_OF_A_GPU_STEP
    return SpeculationConfig(
        num_tokens=tokens,
        is_adaptive=options.num_speculative_tokens == "auto",
        max_running=options.disable_by_batch_size or max(1, step // (1 + tokens)),
        keeps_probabilities=options.method == "draft_model",
    )


def make_speculator(
    config: EngineConfig, options: SpeculativeOptions | None, draft: DraftModel | None, runner: ModelRunner, **load: Any
) -> Speculator | None:
    """The engine's Speculation; reads the draft's weights.

    Args:
        config: of the engine.
        options: None for no speculation.
        draft: what `open_draft` returned.
        runner: of the target, which verifies.
        load: arguments of `DraftModel.load`.
    """
    if options is None or config.speculation is None:
        return None
    proposer: Proposer
    if draft is None:
        proposer = NgramProposer(*options.lookup)
    else:
        model = draft.model
        if model.rope_scaling is not None and model.rope_scaling.depends_on_length and not model.rope_length:
            model = replace(model, rope_length=min(config.scheduler.max_model_len, model.max_position_embeddings))
        steps = DraftRunner(replace(config, model=model), draft.load(**load), config.model.vocab_size)
        runner.drafted = lambda: steps.drafted
        scheduler = config.scheduler
        proposer = DraftModelProposer(
            steps, config.cache.block_size, scheduler.max_num_batched_tokens, model.max_position_embeddings
        )
    return Speculator(config.speculation, proposer)
