"""Distillation: a smaller model learns a larger one's distributions."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxinfer.checkpoint.convert import write_json
from jaxinfer.checkpoint.leaf_shapes import flat, leaf_shapes, nested
from jaxinfer.checkpoint.load import resolve_dtype
from jaxinfer.checkpoint.resumable_directory import Work
from jaxinfer.progress_bar import ProgressBar
from jaxinfer.training.corpus import SEQUENCES, Corpus, DataOptions, mean_over
from jaxinfer.training.curve import TrainingLog, write_curves
from jaxinfer.training.distillation_loss import OBJECTIVES, DistillationLoss, Objective, TextLoss, top_scores
from jaxinfer.training.export import write_model
from jaxinfer.training.feature_cache import LastFeatures, cached_features
from jaxinfer.training.features import check_loss_vocab, cut_output, frequent_tokens
from jaxinfer.training.job_folder import check_resume, job_folder
from jaxinfer.training.logprobs import head_params
from jaxinfer.training.optimizer import make_optimizer
from jaxinfer.training.options import TrainOptions
from jaxinfer.training.packing import PackedRows, batch_rows
from jaxinfer.training.row_cache import RowCache, TopCache
from jaxinfer.training.run_checkpoint import saved_steps
from jaxinfer.training.step import (
    DATA,
    TrainState,
    check_batch_size,
    data_mesh,
    init_state,
    make_evaluation,
    make_step,
    on_mesh,
)
from jaxinfer.training.student_choice import Student, choose_student
from jaxinfer.training.student_texts import StudentTexts
from jaxinfer.training.teacher import Teacher
from jaxinfer.training.training_run import CHECKPOINTS, train
from jaxinfer.typing import Params

if TYPE_CHECKING:
    from jaxinfer.llm import LLM

Batches = Callable[[int, TrainState], dict[str, np.ndarray]]
REPORT = "distillation.json"
TEACHER_FOLDER, STUDENT_FOLDER = "teacher", "student"


@dataclass(frozen=True)
class DistillOptions:
    """What is learned from the teacher.

    Attributes:
        objective, temperature, hidden_weight: see `DistillationLoss`.
        top_k: 0 keeps the teacher in memory and compares whole distributions; k >= 1 asks it once for its k most
            probable tokens at every place, keeps them on disk, and compares those and the rest together.
        cache_features: keep the teacher's last hidden states on disk instead, in float16, and its output head in
            memory: distributions are compared whole.
        loss_vocab: 0 compares all tokens; n >= 1 the n most frequent ones of the data alone, which is most of the work
            where the vocabulary is large.
        on_policy: 0 learns from the texts of `data`; n >= 1 has the student itself write them, anew every n steps, and
            `data.writing` says how many then (arXiv:2306.13649).
        save_dtype: of the weights that are written: "float32", "bfloat16", "float16", or "auto" for the student's own.

    Raises:
        ValueError: a value is out of range, or two of them contradict each other.
    """

    objective: Objective = "forward_kl"
    temperature: float = 1.0
    hidden_weight: float = 0.0
    top_k: int = 0
    cache_features: bool = False
    loss_vocab: int = 0
    on_policy: int = 0
    save_dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective={self.objective!r} must be one of {', '.join(OBJECTIVES)}")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be a number above 0")
        if not 0 <= self.hidden_weight < float("inf"):
            raise ValueError(f"hidden_weight={self.hidden_weight} must be at least 0")
        for name in ("top_k", "on_policy"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if self.on_policy and (self.top_k or self.objective == "cross_entropy"):
            raise ValueError("on_policy has the teacher judge new texts; leave top_k and objective='cross_entropy' out")
        if self.top_k and self.objective == "cross_entropy":
            raise ValueError("top_k is of no use with objective='cross_entropy', which asks no teacher; leave it out")
        kept = "top_k" if self.top_k else "cache_features" if self.cache_features else None
        if kept and self.hidden_weight:
            raise ValueError(f"hidden_weight needs the teacher in memory; leave {kept} out")
        if self.cache_features and (self.top_k or self.on_policy or self.objective == "cross_entropy"):
            raise ValueError(
                "cache_features keeps what the teacher makes of given texts; leave top_k, on_policy and "
                "objective='cross_entropy' out"
            )
        if self.loss_vocab and (self.top_k or self.on_policy):
            raise ValueError("loss_vocab cuts the distributions on given texts; leave top_k and on_policy out")
        resolve_dtype(self.save_dtype, "float32", "any")


@dataclass(frozen=True)
class Distillation:
    """What a run gave. Negative log-probabilities are means over the held-out tokens, in nats; None without such.

    Attributes:
        path: the student's directory.
        num_params: number of its values.
        steps: of the run.
        teacher_nll: of the teacher.
        start_nll, final_nll: of the student before and after.
        recovered: the share of what the student was worse by than the teacher at the start, and is not any more; None
            where it was not worse.
    """

    path: Path
    num_params: int
    steps: int
    teacher_nll: float | None
    start_nll: float | None
    final_nll: float | None
    recovered: float | None


def distill(
    teacher: str | Path,
    output: str | Path,
    data: DataOptions,
    training: TrainOptions,
    options: DistillOptions | None = None,
    *,
    student: Path | None = None,
    student_layers: int | Sequence[int] | None = None,
    teacher_cache: Path | None = None,
    resume: bool = False,
    progress: bool = False,
) -> Distillation:
    """Trains a student and writes it as a Hugging Face directory that `LLM(output)` serves.

    The directory appears when it is whole; beside the model it has the log of the run (training_log.jsonl and .csv,
    loss.png) and distillation.json. A killed or interrupted process leaves ``.NAME.partial-resumable`` beside it, with
    the teacher's texts and tokens as far as they are done and Orbax checkpoints of the student, the optimizer and the
    place in the data. The same call with `resume` goes on, and gives bit for bit what an uninterrupted one gives.

    Args:
        teacher: model directory or GGUF file.
        output: a directory that does not exist yet or is empty.
        data: where the texts come from.
        training: sizes and rates.
        options: what is learned.
        student, student_layers: see `choose_student`.
        teacher_cache: where the teacher's texts and top tokens are kept for further runs; None keeps them for this one.
        resume: go on with an unfinished run, if there is one.
        progress: show progress bars.

    Raises:
        ValueError: something does not fit, by name; nothing has been loaded.
        RuntimeError: the run failed; what is done stays.
    """
    options = DistillOptions() if options is None else options
    output = Path(output).expanduser()
    check_resume(output, resume)
    mesh = data_mesh(training.devices)
    check_batch_size(training.batch_size, training.accumulate, mesh.size)
    source = Teacher(Path(teacher), training.dtype)
    chosen = choose_student(source.checkpoint, student, student_layers)
    if options.top_k >= source.config.vocab_size:
        raise ValueError(f"top_k={options.top_k} must be below the vocabulary's {source.config.vocab_size} tokens")
    check_loss_vocab(options.loss_vocab, source.config.vocab_size)
    corpus = Corpus(data, source.tokenizer, source.checkpoint)
    if options.on_policy and data.writing is None:
        raise ValueError("on_policy needs data='generate': the student continues prompts")
    make_optimizer(training.optimizer)
    identity = {
        "teacher": str(source.checkpoint.path),
        "student": f"{student_layers} layers" if student is None else str(student),
        **asdict(options),
        **training.identity(),
        **data.identity(),
    }
    with job_folder(output, identity) as work:
        run = _Run(source, chosen, corpus, training, options, work, teacher_cache or work.folder / TEACHER_FOLDER)
        report = run.finish(output, progress)
        write_json(work.folder / REPORT, {**asdict(report), "path": str(output), "options": identity})
        for folder in (TEACHER_FOLDER, STUDENT_FOLDER, CHECKPOINTS):
            shutil.rmtree(work.folder / folder, ignore_errors=True)
    return report


class _Run:
    """One process's share of the work."""

    def __init__(
        self,
        teacher: Teacher,
        student: Student,
        corpus: Corpus,
        training: TrainOptions,
        options: DistillOptions,
        work: Work,
        kept: Path,
    ) -> None:
        self._teacher, self._student, self._corpus = teacher, student, corpus
        self._training, self._options, self._work, self._kept = training, options, work, kept
        self._mesh = data_mesh(training.devices)
        self._loaded: Params | None = None
        self._cut: Params = {}

    def finish(self, output: Path, progress: bool) -> Distillation:
        """Does what is left, and writes the student."""
        batch_of, held_out = self._data(progress)
        self._measure_teacher(held_out, progress)
        trained = self._start(progress)
        frozen = self._frozen(progress)
        self._loaded = None  # what is needed is in `frozen`
        loss = DistillationLoss(
            self._student.config,
            self._teacher.config,
            self._options.objective,
            self._options.temperature,
            self._options.hidden_weight,
            self._teacher.dtype,
            self._training.remat,
        )
        optimizer = make_optimizer(self._training.optimizer)
        state, log = train(
            self._work.folder,
            init_state(trained, optimizer, self._mesh),
            make_step(loss, optimizer, self._mesh, accumulate=self._training.accumulate),
            frozen,
            batch_of,
            self._training.pace,
            evaluate=self._evaluation(held_out),
            progress=progress,
        )
        return self._write(output, state.trained["model"], log)

    def _data(self, progress: bool) -> tuple[Batches, PackedRows | None]:
        """The batches, and the rows to measure on."""
        size, seed = self._training.batch_size, self._training.seed
        if self._options.on_policy:
            texts = self._student_texts()

            def own(step: int, state: TrainState) -> dict[str, np.ndarray]:
                chosen = texts.rows(step, size, seed, state.trained["model"])
                return chosen.batch()

            return own, self._corpus.held_out
        with _bar(self._corpus.texts_to_write, "Teacher's texts", "text", progress) as bar:
            rows, held_out = self._corpus.rows(self._kept / "texts", self._teacher.llm_maker(), bar.update)
        kept = self._top_tokens(rows, progress)
        if self._options.cache_features:
            sizes = self._mesh, size, progress
            params = self._params(progress)
            kept = cached_features(self._kept / "features", rows, LastFeatures(), self._teacher, params, *sizes)
        if self._options.loss_vocab:
            tokens = frequent_tokens(rows, self._options.loss_vocab, self._teacher.config.vocab_size)
            self._cut = cut_output(self._teacher.config, self._params(progress), tokens)

        def given(step: int, state: TrainState) -> dict[str, np.ndarray]:
            which = batch_rows(len(rows), size, step, seed)
            chosen = rows.rows(which)
            return {**chosen.batch(), **({} if kept is None else kept.read(which))}

        return given, held_out

    def _student_texts(self) -> StudentTexts:
        options = self._corpus.options
        assert options.writing is not None

        def make(params: Params) -> "LLM":
            from jaxinfer.llm import LLM

            here = jax.tree.map(lambda leaf: leaf.addressable_data(0).astype(self._teacher.dtype), params)
            sizes: dict[str, Any] = {"max_model_len": self._corpus.longest, "max_num_seqs": SEQUENCES}
            return LLM(params=here, model_config=self._student.config, enforce_eager=True, **sizes)

        folder = self._work.folder / STUDENT_FOLDER
        prompts, ends = self._corpus.prompts, self._corpus.ends
        return StudentTexts(folder, prompts, options.writing, ends, options.seq_len, self._options.on_policy, make)

    def _frozen(self, progress: bool) -> Params:
        """What the steps need of the teacher."""
        options = self._options
        if options.cache_features:
            return {**head_params(self._params(progress)), **self._cut}
        asked = (options.objective != "cross_entropy" and not options.top_k) or options.hidden_weight
        return {**self._params(progress), **self._cut} if asked else self._cut

    def _params(self, progress: bool) -> Params:
        if self._loaded is None:
            self._loaded = self._teacher.params(self._mesh, progress)
        return self._loaded

    def _top_tokens(self, rows: PackedRows, progress: bool) -> RowCache | None:
        """The teacher's top tokens, made as far as they are missing."""
        k, temperature = self._options.top_k, self._options.temperature
        if not k:
            return None
        identity = {
            "teacher": str(self._teacher.checkpoint.path),
            "temperature": temperature,
            "dtype": self._teacher.dtype,
        }
        cache = TopCache(self._kept / "top", rows, k, identity)
        if not cache.missing:
            return cache
        score = jax.jit(
            jax.shard_map(
                partial(_score, self._teacher.config, k, temperature),
                mesh=self._mesh,
                in_specs=(PartitionSpec(), PartitionSpec(DATA)),
                out_specs=PartitionSpec(DATA),
                check_vma=False,
            )
        )
        params = self._params(progress)

        def of(some: PackedRows) -> dict[str, np.ndarray]:
            batch = on_mesh({"ids": some.ids, "segments": some.segments}, self._mesh)
            found: dict[str, np.ndarray] = jax.device_get(score(params, batch))
            return found

        with _bar(len(rows), "Teacher's tokens", "row", progress) as bar:
            cache.fill(of, self._training.batch_size, bar.update)
        return cache

    def _measure_teacher(self, held_out: PackedRows | None, progress: bool) -> None:
        """Notes what the teacher's own loss on the held-out text is."""
        if held_out is None or "teacher_nll" in self._work.progress:
            return
        evaluate = make_evaluation(TextLoss(self._teacher.config), self._mesh)
        params = self._params(progress)
        means = mean_over(held_out, self._training.batch_size, lambda batch: evaluate(params, {}, batch))
        self._work.save({**self._work.progress, "teacher_nll": means["nll"]})

    def _start(self, progress: bool) -> dict[str, Any]:
        """What is trained, before the first step; zeros where a checkpoint will take their place."""
        config = self._student.config
        if saved_steps(self._work.folder / CHECKPOINTS):
            specs = leaf_shapes(config, "float32")
            model: Any = nested({name: np.zeros(spec.shape, np.float32) for name, spec in specs.items()})
        else:
            needs = not self._student.checkpoint.has_weights
            model = self._student.params(self._params(progress) if needs else None, self._training.seed)
        trained = {"model": model}
        theirs, mine = self._teacher.config.hidden_size, config.hidden_size
        if self._options.hidden_weight and theirs != mine:
            rng = np.random.default_rng([self._training.seed, 1])
            trained["projection"] = (rng.standard_normal((theirs, mine)) * mine**-0.5).astype(np.float32)
        return trained

    def _evaluation(self, held_out: PackedRows | None) -> Callable[[Any], dict[str, float]]:
        if held_out is None:
            return lambda state: {}
        evaluate = make_evaluation(TextLoss(self._student.config), self._mesh)

        def measure(state: Any) -> dict[str, float]:
            sums = lambda batch: evaluate(state.trained["model"], {}, batch)  # noqa: E731
            means = mean_over(held_out, self._training.batch_size, sums)
            return {f"eval_{name}": means[name] for name in ("nll", "top1", "length")}

        return measure

    def _write(self, output: Path, params: Params, log: TrainingLog) -> Distillation:
        folder, checkpoint = self._work.folder, self._student.checkpoint
        write_curves(log.entries, output.name, folder)
        own = checkpoint if checkpoint.has_weights else self._teacher.checkpoint
        write_model(folder, checkpoint, own, params, resolve_dtype(self._options.save_dtype, checkpoint.dtype, "any"))
        measured = [entry["eval_nll"] for entry in log.entries if "eval_nll" in entry]
        teacher = self._work.progress.get("teacher_nll")
        start, final = (measured[0], measured[-1]) if measured else (None, None)
        recovered = None
        if teacher is not None and start is not None and final is not None and start > teacher:
            recovered = (start - final) / (start - teacher)
        size = sum(leaf.size for leaf in flat(params).values())
        return Distillation(output, size, self._training.pace.steps, teacher, start, final, recovered)


def _score(config: Any, k: int, temperature: float, params: Any, batch: Any) -> Any:
    return top_scores(config, params, batch, k, temperature)


def _bar(total: int, what: str, unit: str, progress: bool) -> ProgressBar:
    return ProgressBar(total=total, desc=what, unit=unit, disable=not progress or not total)
