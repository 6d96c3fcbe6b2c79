"""Training heads for speculation on a frozen model: Medusa's and EAGLE's."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checkpoint.convert import write_json
from jaxinfer.checkpoint.leaf_shapes import flat
from jaxinfer.checkpoint.load import resolve_dtype
from jaxinfer.progress_bar import ProgressBar
from jaxinfer.training.corpus import Corpus, DataOptions, mean_of
from jaxinfer.training.curve import write_curves
from jaxinfer.training.feature_cache import cached_features
from jaxinfer.training.features import check_loss_vocab, cut_output, frequent_tokens
from jaxinfer.training.head_kinds import Eagle, Eagle3, Medusa
from jaxinfer.training.job_folder import check_resume, job_folder
from jaxinfer.training.logprobs import head_params
from jaxinfer.training.optimizer import make_optimizer
from jaxinfer.training.options import TrainOptions
from jaxinfer.training.packing import PackedRows, batch_rows
from jaxinfer.training.row_cache import RowCache
from jaxinfer.training.step import Loss, check_batch_size, data_mesh, init_state, make_evaluation, make_step
from jaxinfer.training.teacher import Teacher
from jaxinfer.training.training_run import CHECKPOINTS, train
from jaxinfer.typing import Params

REPORT = "training.json"
TEXTS, FEATURES = "texts", "features"


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
    kind: Medusa | Eagle | Eagle3,
    data: DataOptions,
    training: TrainOptions,
    *,
    save_dtype: str = "auto",
    teacher_cache: Path | None = None,
    loss_vocab: int = 0,
    cache_features: bool = False,
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
        teacher_cache: where the model's texts and hidden states are kept for further runs; None keeps them for this
            one.
        loss_vocab: n >= 1 has the loss compare the n most frequent tokens of the data alone, which saves most of the
            work where the vocabulary is large; 0 compares all.
        cache_features: compute the model's hidden states once, and keep them on disk in float16.
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
    check_loss_vocab(loss_vocab, source.config.vocab_size)
    corpus = Corpus(data, source.tokenizer, source.checkpoint)
    make_optimizer(training.optimizer)
    identity = {
        "teacher": str(source.checkpoint.path),
        "heads": {type(kind).__name__.lower(): asdict(kind)},
        "save_dtype": save_dtype,
        "loss_vocab": loss_vocab,
        "cache_features": cache_features,
        **training.identity(),
        **data.identity(),
    }
    with job_folder(output, identity) as work:
        kept = teacher_cache or work.folder
        total = corpus.texts_to_write
        with ProgressBar(total=total, desc="Model's texts", unit="text", disable=not (progress and total)) as bar:
            rows, held_out = corpus.rows(kept / TEXTS, source.llm_maker(), bar.update)
        params = source.params(mesh, progress)

        def with_features(some: PackedRows) -> _Data:
            if not cache_features:
                return _Data(some, None)
            sizes = mesh, training.batch_size, progress
            return _Data(some, cached_features(kept / FEATURES, some, kind.features(source), source, params, *sizes))

        learned, measured = with_features(rows), None if held_out is None else with_features(held_out)
        optimizer = make_optimizer(training.optimizer)
        cut = _cut(source, params, rows, loss_vocab)
        started = kind.start(source, {**params, **cut}, training.seed, learned.batches(training.batch_size))
        frozen = {**(head_params(params) if cache_features else params), **cut}
        state, log = train(
            work.folder,
            init_state(started, optimizer, mesh),
            make_step(kind.loss(source, frozen), optimizer, mesh, accumulate=training.accumulate),
            frozen,
            lambda step, state: _batch(learned, training, step),
            training.pace,
            evaluate=_evaluation(kind.measure(source, frozen), measured, frozen, training),
            progress=progress,
        )
        write_curves(log.entries, output.name, work.folder)
        kind.write(work.folder, source, frozen, state.trained, _save_dtype(save_dtype, source))
        report = TrainedHeads(output, _size(state.trained), training.pace.steps, *_first_and_last(log.entries))
        write_json(work.folder / REPORT, {**asdict(report), "path": str(output), "options": identity})
        for folder in (TEXTS, FEATURES, CHECKPOINTS):
            shutil.rmtree(work.folder / folder, ignore_errors=True)
    return report


@dataclass(frozen=True)
class _Data:
    """Rows, and the hidden states of their tokens where those are kept."""

    rows: PackedRows
    features: RowCache | None

    def batch(self, which: np.ndarray, size: int) -> dict[str, np.ndarray]:
        """Those rows, filled up to `size`."""
        batch = self.rows.rows(which).filled(size).batch()
        if self.features is None:
            return batch
        features = self.features.read(which)["features"]
        missing = ((0, size - len(which)), (0, 0), (0, 0))
        return {**batch, "features": np.pad(features, missing)}

    def batches(self, size: int) -> Iterator[dict[str, np.ndarray]]:
        """All rows in order, so many at a time; the last batch is filled up."""
        for first in range(0, len(self.rows), size):
            yield self.batch(np.arange(first, min(first + size, len(self.rows))), size)


def _cut(source: Teacher, params: Params, rows: PackedRows, loss_vocab: int) -> Params:
    """What the loss needs to compare some tokens only."""
    if not loss_vocab:
        return {}
    return cut_output(source.config, params, frequent_tokens(rows, loss_vocab, source.config.vocab_size))


def _batch(data: _Data, training: TrainOptions, step: int) -> dict[str, np.ndarray]:
    """A step's rows, and for each a key for noise that depends on step and place alone."""
    size = training.batch_size
    chosen = data.batch(batch_rows(len(data.rows), size, step, training.seed), size)
    keys = np.random.default_rng([training.seed, 2, step]).integers(0, 2**32, (size, 2), np.uint32)
    return {**chosen, "noise": keys}


def _evaluation(
    loss: Loss, held_out: _Data | None, frozen: Params, training: TrainOptions
) -> Callable[[Any], dict[str, float]]:
    if held_out is None:
        return lambda state: {}
    evaluate, size = make_evaluation(loss, data_mesh(training.devices)), training.batch_size

    def measure(state: Any) -> dict[str, float]:
        found = mean_of(evaluate(state.trained, frozen, batch) for batch in held_out.batches(size))
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
