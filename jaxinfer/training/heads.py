"""Training heads for speculation on a frozen model: Medusa's and EAGLE's."""

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jaxinfer.checkpoint.convert import write_json
from jaxinfer.checkpoint.eagle_head import write_eagle
from jaxinfer.checkpoint.hf_export import exported_config
from jaxinfer.checkpoint.leaf_shapes import flat
from jaxinfer.checkpoint.load import resolve_dtype
from jaxinfer.checkpoint.medusa_heads import write_medusa
from jaxinfer.models.eagle import eagle_config, init_eagle
from jaxinfer.models.medusa import MedusaConfig, init_medusa
from jaxinfer.progress_bar import ProgressBar
from jaxinfer.training.corpus import Corpus, DataOptions, mean_over
from jaxinfer.training.curve import write_curves
from jaxinfer.training.head_losses import EagleLoss, MedusaLoss
from jaxinfer.training.job_folder import check_resume, job_folder
from jaxinfer.training.optimizer import make_optimizer
from jaxinfer.training.options import TrainOptions
from jaxinfer.training.packing import PackedRows, batch_rows
from jaxinfer.training.step import Loss, check_batch_size, data_mesh, init_state, make_evaluation, make_step
from jaxinfer.training.student import cut_hf_config
from jaxinfer.training.teacher import Teacher
from jaxinfer.training.training_run import CHECKPOINTS, train
from jaxinfer.typing import Params

REPORT = "training.json"
TEXTS = "texts"


class HeadKind(Protocol):
    """A kind of heads: what it is for a model, how it starts and what it learns."""

    def check(self, model: Teacher) -> None:
        """Raises ValueError where there are no such heads for this model."""
        ...

    def start(self, model: Teacher, params: Params, seed: int) -> Params:
        """Float32 parameters before the first step."""
        ...

    def loss(self, model: Teacher) -> Loss:
        """What is minimised."""
        ...

    def write(self, folder: Path, model: Teacher, frozen: Params, params: Params, dtype: str) -> None:
        """Writes the files that are read as such heads."""
        ...


@dataclass(frozen=True)
class Medusa:
    """Medusa heads.

    Attributes:
        num_heads: how many tokens beyond the next one are guessed.
        num_layers: residual blocks of a head.
        own_heads: each head has an output matrix of its own, which starts as the model's; it takes as much memory as
            the model's, and three times that during training.
        decay: see `MedusaLoss`.

    Raises:
        ValueError: a number is out of range.
    """

    num_heads: int
    num_layers: int = 1
    own_heads: bool = False
    decay: float = 0.8

    def __post_init__(self) -> None:
        MedusaConfig(1, 1, self.num_heads, self.num_layers)
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay={self.decay} must be above 0 and at most 1")

    def config(self, model: Teacher) -> MedusaConfig:
        """Sizes of the heads of this model."""
        sizes = model.config.hidden_size, model.config.vocab_size
        return MedusaConfig(*sizes, self.num_heads, self.num_layers, self.own_heads)

    def check(self, model: Teacher) -> None:
        """Every model can have them."""

    def start(self, model: Teacher, params: Params, seed: int) -> Params:
        """Heads that say what the model says of the next token."""
        tied = model.config.tie_word_embeddings
        matrix = params["embed"]["embedding"] if tied else params["lm_head"]["kernel"]
        return init_medusa(self.config(model), matrix if self.own_heads else None)

    def loss(self, model: Teacher) -> Loss:
        """Medusa-1's."""
        return MedusaLoss(model.config, self.config(model), self.decay, model.dtype)

    def write(self, folder: Path, model: Teacher, frozen: Params, params: Params, dtype: str) -> None:
        """medusa_lm_head.safetensors and config.json."""
        write_medusa(folder, self.config(model), params, str(model.checkpoint.path), dtype)


@dataclass(frozen=True)
class Eagle:
    """An EAGLE head.

    Attributes:
        use_bias: whether the layer that joins token and feature adds a bias.
        noise, classification_weight: see `EagleLoss`.

    Raises:
        ValueError: a number is out of range.
    """

    use_bias: bool = True
    noise: float = 0.1
    classification_weight: float = 0.1

    def __post_init__(self) -> None:
        for name in ("noise", "classification_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")

    def check(self, model: Teacher) -> None:
        """Refuses models whose layers are of another kind, or whose config.json cannot be written."""
        eagle_config(model.config)
        exported_config(self._description(model))

    def start(self, model: Teacher, params: Params, seed: int) -> Params:
        """Fresh parameters."""
        config = eagle_config(model.config)
        fresh: Params = jax.jit(lambda key: init_eagle(config, key, use_bias=self.use_bias))(jax.random.key(seed))
        return fresh

    def loss(self, model: Teacher) -> Loss:
        """Smooth L1 and cross-entropy."""
        head = eagle_config(model.config)
        return EagleLoss(model.config, head, self.use_bias, self.classification_weight, self.noise, model.dtype)

    def write(self, folder: Path, model: Teacher, frozen: Params, params: Params, dtype: str) -> None:
        """model.safetensors and config.json."""
        write_eagle(folder, self._description(model), params, np.asarray(frozen["embed"]["embedding"]), dtype)

    def _description(self, model: Teacher) -> Any:
        checkpoint = model.checkpoint
        said = cut_hf_config(checkpoint.hf_config, [0])
        head = eagle_config(model.config)
        return replace(checkpoint, model_config=head, hf_config=said, placements=(), leaves=None, layout=None)


@dataclass(frozen=True)
class TrainedHeads:
    """What a run gave.

    Attributes:
        path: the directory.
        num_params: number of values that were trained.
        steps: of the run.
        before, after: means over the held-out tokens by the names of the loss's sums ("loss", "top1", ...); empty
            without such.
    """

    path: Path
    num_params: int
    steps: int
    before: dict[str, float]
    after: dict[str, float]


def train_heads(
    model: str | Path,
    output: str | Path,
    kind: Medusa | Eagle,
    data: DataOptions,
    training: TrainOptions,
    *,
    save_dtype: str = "auto",
    teacher_cache: Path | None = None,
    resume: bool = False,
    progress: bool = False,
) -> TrainedHeads:
    """Trains heads on a frozen model and writes them in the layout in which such heads are published.

    The directory appears when it is whole, with the log of the run beside the heads. What a killed process leaves, and
    how `resume` goes on, is as with `jaxinfer.training.distill.distill`.

    Args:
        model: model directory or GGUF file; it is not changed.
        output: a directory that does not exist yet or is empty.
        kind: which heads.
        data: where the texts come from; those that the model writes itself are what it will be asked to guess.
        training: sizes and rates.
        save_dtype: of the tensors: "float32", "bfloat16", "float16", or "auto" for the model's own.
        teacher_cache: where the model's texts are kept for further runs; None keeps them for this one.
        resume: go on with an unfinished run, if there is one.
        progress: show progress bars.

    Raises:
        ValueError: something does not fit, by name; nothing has been loaded.
        RuntimeError: the run failed; what is done stays.
    """
    output = Path(output).expanduser()
    check_resume(output, resume)
    mesh = data_mesh(training.devices)
    check_batch_size(training.batch_size, training.accumulate, mesh.size)
    resolve_dtype(save_dtype, "float32", "any")
    source = Teacher(Path(model), training.dtype)
    kind.check(source)
    corpus = Corpus(data, source.tokenizer, source.checkpoint)
    make_optimizer(training.optimizer)
    identity = {
        "teacher": str(source.checkpoint.path),
        "heads": {type(kind).__name__.lower(): asdict(kind)},
        "save_dtype": save_dtype,
        **training.identity(),
        **data.identity(),
    }
    with job_folder(output, identity) as work:
        kept = (teacher_cache or work.folder) / TEXTS
        total = corpus.texts_to_write
        with ProgressBar(total=total, desc="Model's texts", unit="text", disable=not (progress and total)) as bar:
            rows, held_out = corpus.rows(kept, source.llm_maker(), bar.update)
        frozen = source.params(mesh, progress)
        optimizer, loss = make_optimizer(training.optimizer), kind.loss(source)
        state, log = train(
            work.folder,
            init_state(kind.start(source, frozen, training.seed), optimizer, mesh),
            make_step(loss, optimizer, mesh, accumulate=training.accumulate),
            frozen,
            lambda step, state: _batch(rows, training, step),
            training.pace,
            evaluate=_evaluation(loss, held_out, frozen, training),
            progress=progress,
        )
        write_curves(log.entries, output.name, work.folder)
        kind.write(work.folder, source, frozen, state.trained, _save_dtype(save_dtype, source))
        report = TrainedHeads(output, _size(state.trained), training.pace.steps, *_first_and_last(log.entries))
        write_json(work.folder / REPORT, {**asdict(report), "path": str(output), "options": identity})
        for folder in (TEXTS, CHECKPOINTS):
            shutil.rmtree(work.folder / folder, ignore_errors=True)
    return report


def _batch(rows: PackedRows, training: TrainOptions, step: int) -> dict[str, np.ndarray]:
    """A step's rows, and for each a key for noise that depends on step and place alone."""
    chosen = rows.rows(batch_rows(len(rows), training.batch_size, step, training.seed))
    keys = np.random.default_rng([training.seed, 2, step]).integers(0, 2**32, (training.batch_size, 2), np.uint32)
    return {"ids": chosen.ids, "segments": chosen.segments, "noise": keys}


def _evaluation(
    loss: Loss, held_out: PackedRows | None, frozen: Params, training: TrainOptions
) -> Callable[[Any], dict[str, float]]:
    if held_out is None:
        return lambda state: {}
    evaluate = make_evaluation(loss, data_mesh(training.devices))

    def measure(state: Any) -> dict[str, float]:
        found = mean_over(held_out, training.batch_size, lambda batch: evaluate(state.trained, frozen, batch))
        return {f"eval_{name}": value for name, value in found.items()}

    return measure


def _first_and_last(entries: list[dict[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
    measured = [
        {name.removeprefix("eval_"): value for name, value in entry.items() if name.startswith("eval_")}
        for entry in entries
    ]
    measured = [entry for entry in measured if entry]
    return (measured[0], measured[-1]) if measured else ({}, {})


def _save_dtype(wanted: str, model: Teacher) -> str:
    return resolve_dtype(wanted, model.checkpoint.dtype, "any")


def _size(tree: Params) -> int:
    return sum(leaf.size for leaf in flat(tree).values())
