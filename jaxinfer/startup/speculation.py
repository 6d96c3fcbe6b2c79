"""From speculative options to the engine's Speculation."""

from dataclasses import dataclass

from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.config import FeatureKind, SpeculationConfig
from jaxinfer.models.config import ModelConfig
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.speculation.lookahead import LookaheadProposer
from jaxinfer.speculation.ngram import NgramProposer
from jaxinfer.speculation.proposer import Proposer
from jaxinfer.speculation.speculator import Speculator
from jaxinfer.startup.args import EngineArgs
from jaxinfer.startup.draft_model import DraftModel, make_draft, open_draft
from jaxinfer.startup.eagle import Eagle, make_eagle, open_eagle
from jaxinfer.startup.guesser import Guesser
from jaxinfer.startup.medusa import Medusa, make_medusa, open_medusa
from jaxinfer.startup.resting_weights import RestingWeights
from jaxinfer.startup.speculation_options import SpeculationMethod, SpeculativeOptions
from jaxinfer.tokenizers.tokenizer import Tokenizer

TOKENS_OF_A_CPU_STEP, TOKENS_OF_A_GPU_STEP = 64, 256
"""Up to here a step's time is about that of reading the weights: on a CPU of few cores, and on GPUs, whose tensor
cores do 150 to 250 multiplications for each byte of 16-bit weights."""


def open_guesser(
    args: EngineArgs,
    options: SpeculativeOptions | None,
    target: ModelConfig,
    source: Checkpoint | None,
    tokenizer: Tokenizer | None,
    num_parts: int = 1,
) -> Guesser | None:
    """What the method loads, checked against the target; None where it loads nothing.

    Args:
        args: settings of the engine.
        options: of the speculation; None for none.
        target: the target's architecture.
        source: its checkpoint; None for live parameters.
        tokenizer: that of the engine, which is the target's own where it has no checkpoint.
        num_parts: devices that the target is split over.

    Raises:
        ValueError: the method needs the target whole on a device.
        ValueError, ConnectionError: as `open_draft`, `open_medusa` and `open_eagle`.
    """
    if options is None:
        return None
    if options.method == "draft_model":
        return open_draft(args, options, target, source, tokenizer)
    if options.method == "medusa":
        return open_medusa(args, options, target)
    if options.method in ("eagle", "eagle3"):
        if num_parts > 1:
            raise ValueError(
                f"speculative method {options.method!r} needs the model whole on a device, and tensor_parallel_size="
                f"{num_parts} splits it; use 'medusa', 'ngram', 'lookahead' or a draft model"
            )
        return open_eagle(args, options, target)
    return None


def speculation_config(
    options: SpeculativeOptions | None, guesser: Guesser | None, platform: str
) -> SpeculationConfig | None:
    """What the engine needs to know of it.

    Args:
        options: None for no speculation.
        guesser: what `open_guesser` returned.
        platform: JAX's name of the device's platform.
    """
    if options is None:
        return None
    tokens = options.max_tokens
    depth = options.lookahead.depth if options.method == "lookahead" else 0
    step = TOKENS_OF_A_CPU_STEP if platform == "cpu" else TOKENS_OF_A_GPU_STEP
    return SpeculationConfig(
        num_tokens=tokens,
        is_adaptive=options.num_speculative_tokens == "auto",
        max_running=options.disable_by_batch_size or max(1, step // (1 + tokens)),
        keeps_probabilities=options.method == "draft_model",
        tree_depth=depth if guesser is None else guesser.tree_depth(tokens),
        typical=options.typical,
        features=_FEATURES.get(options.method) if options.method is not None else None,
        eagle=guesser.tree if isinstance(guesser, Eagle) else None,
    )


_FEATURES: dict[SpeculationMethod, FeatureKind] = {"medusa": "hidden", "eagle": "eagle", "eagle3": "eagle"}
"""What methods guess from."""


@dataclass(frozen=True)
class MadeSpeculation:
    """A method that is ready.

    Attributes:
        speculator: the engine's Speculation.
        weights: of the method's own model or heads; None where it has none.
    """

    speculator: Speculator
    weights: RestingWeights | None = None


def make_speculation(
    options: SpeculativeOptions | None, guesser: Guesser | None, runner: ModelRunner, progress: bool
) -> MadeSpeculation | None:
    """The method of an engine; reads its weights. None for no speculation.

    Args:
        options: None for no speculation.
        guesser: what `open_guesser` returned.
        runner: of the target, which verifies.
        progress: show bars.
    """
    config = runner.config
    if options is None or config.speculation is None:
        return None
    proposer: Proposer
    weights: RestingWeights | None = None
    if isinstance(guesser, DraftModel):
        proposer, weights = make_draft(guesser, runner, progress)
    elif isinstance(guesser, Medusa):
        proposer, weights = make_medusa(guesser, options, runner)
    elif isinstance(guesser, Eagle):
        proposer, weights = make_eagle(guesser, runner)
    elif options.method == "lookahead":
        proposer = LookaheadProposer(options.lookahead, options.pool_from_prompt is not False)
    else:
        proposer = NgramProposer(*options.lookup)
    return MadeSpeculation(Speculator(config.speculation, proposer), weights)
