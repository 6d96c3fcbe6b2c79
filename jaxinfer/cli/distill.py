"""`jaxinfer distill`: a smaller model from a larger one."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.human_int import human_int
from jaxinfer.cli.model_options import add_model_options, find_model

if TYPE_CHECKING:
    from jaxinfer.training.corpus import DataOptions
    from jaxinfer.training.distill import Distillation, DistillOptions
    from jaxinfer.training.head_kinds import Eagle, Eagle3, Medusa
    from jaxinfer.training.heads import TrainedHeads
    from jaxinfer.training.options import TrainOptions

DESCRIPTION = """\
Trains a student on a teacher's distributions and writes it as a directory of safetensors in Hugging Face's layout, with
the teacher's tokenizer; `--model OUTPUT` serves it. Beside the model lie the log of the run (training_log.jsonl and
.csv), a picture of it (loss.png, with `pip install 'jaxinfer[plot]'`) and distillation.json.

The student is a checkpoint (--student DIR), which is trained further; an architecture in a .json file (a config.json,
or the fields of a ModelConfig), which takes over what fits of the teacher; or the teacher with fewer layers
(--student-layers N), every second one for half of them, or with some that are named (--student-layers 0,1,5).

The texts are those of files, or the teacher's own (--data generate). A .jsonl file has a JSON object a line with
"text", "prompt" (and "completion") or "messages". What is held out of training says how much of the likelihood that the
student lacks at the start it gets back.

--top-k K asks the teacher once for its K most probable tokens at every place and keeps them on disk, so that it need
not be in memory; teacher and student are compared by those and by how much is left for all other tokens together.

--medusa-heads, --eagle and --eagle3 train heads for speculation on the teacher itself, which stays as it is; OUTPUT
then has them in the layout in which such heads are published. --answers-only, --cache-features and --loss-vocab save
most of the work on a small machine: what the model says is learned, from hidden states that are computed once, among
the tokens that it says.

OUTPUT appears when it is whole. A run that is stopped or killed leaves what it has done beside OUTPUT, and the same
command with --resume goes on from the last checkpoint, to the same bits as without a break.
"""


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "distill",
        help="train a smaller model on a larger one's predictions",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--teacher", required=True, metavar="MODEL", help="folder, GGUF file, Hub id or built-in name")
    add("--student", type=Path, metavar="DIR|JSON", help="a checkpoint, or an architecture")
    add(
        "--student-layers",
        type=_layers,
        metavar="N|I,J",
        help="the teacher with so many of its layers, or with these",
    )
    add("--output", type=Path, required=True, metavar="DIR", help="new or empty folder")
    add("--resume", action="store_true", help="go on with an unfinished run of the same command, if there is one")
    _add_data(parser.add_argument_group("data"))
    _add_objective(parser.add_argument_group("objective"))
    _add_training(parser.add_argument_group("training"))
    _add_heads(parser.add_argument_group("heads for speculation"))
    add_model_options(parser)


def _add_data(group: Any) -> None:
    add = group.add_argument
    add(
        "--data",
        nargs="+",
        required=True,
        metavar="FILE",
        help="text and .jsonl files, or 'generate' for texts that the teacher writes",
    )
    add("--prompts", type=Path, nargs="+", default=(), metavar="FILE", help="with generate: what the teacher continues")
    add("--num-texts", type=human_int, metavar="N", help="with generate: how many texts. Default: 1000.")
    add("--max-tokens", type=human_int, metavar="N", help="with generate: of a text beside its prompt. Default: 256.")
    add("--sampling-temperature", type=float, metavar="T", help="with generate: of the texts. Default: 1.")
    add("--top-p", type=float, metavar="P", help="with generate: of the texts. Default: 1.")
    add("--answers-only", action="store_true", help="with generate: prompts are seen, and only answers are learned")
    add("--seq-len", type=human_int, default=512, metavar="N", help="tokens of a row; texts share rows. Default: 512.")
    add("--eval-data", type=Path, nargs="+", default=(), metavar="FILE", help="what to measure on")
    add(
        "--eval-fraction",
        type=float,
        default=0.05,
        metavar="X",
        help="without --eval-data: share of the rows that is held out of training. Default: 0.05.",
    )
    add("--teacher-cache", type=Path, metavar="DIR", help="keep the teacher's texts and tokens there for further runs")


def _add_objective(group: Any) -> None:
    add = group.add_argument
    add(
        "--objective",
        default="forward_kl",
        metavar="NAME",
        help="forward_kl, reverse_kl or cross_entropy. Default: forward_kl.",
    )
    add("--temperature", type=float, default=1.0, metavar="T", help="of both distributions. Default: 1.")
    add("--hidden-weight", type=float, default=0.0, metavar="W", help="of the last layers' difference. Default: 0.")
    add(
        "--on-policy",
        type=human_int,
        default=0,
        metavar="N",
        help="with generate: the student writes the texts, --num-texts of them anew every N steps. Default: 0, the "
        "teacher does.",
    )
    add(
        "--top-k",
        type=human_int,
        default=0,
        metavar="K",
        help="keep the teacher's K most probable tokens on disk. Default: 0, the teacher stays in memory.",
    )


def _add_training(group: Any) -> None:
    add = group.add_argument
    add("--steps", type=human_int, default=1000, metavar="N", help="Default: 1000.")
    add("--batch-size", type=human_int, default=8, metavar="N", help="rows of a step, over all devices. Default: 8.")
    add("--accumulate", type=human_int, default=1, metavar="N", help="compute a batch in so many parts. Default: 1.")
    add("--devices", type=human_int, metavar="N", help="split batches over so many devices. Default: all.")
    add("--learning-rate", type=float, default=3e-4, metavar="X", help="at its highest. Default: 0.0003.")
    add("--warmup-steps", type=human_int, metavar="N", help="Default: 3 in 100 steps.")
    add("--final-ratio", type=float, default=0.1, metavar="X", help="of the rate at the end. Default: 0.1.")
    add("--weight-decay", type=float, default=0.0, metavar="X", help="of matrices. Default: 0.")
    add("--clip-norm", type=float, default=1.0, metavar="X", help="what gradients are cut down to. Default: 1.")
    add("--dtype", default="auto", metavar="DTYPE", help="in which models compute: float32, bfloat16, float16, or auto")
    add(
        "--loss-vocab",
        type=human_int,
        default=0,
        metavar="N",
        help="compare the N most frequent tokens of the data alone. Default: 0, all.",
    )
    add(
        "--cache-features",
        action="store_true",
        help="compute the teacher's hidden states once, and keep them on disk (2 bytes a channel and token)",
    )
    add("--save-dtype", default="auto", metavar="DTYPE", help="of the weights that are written; auto is the student's")
    add("--remat", action="store_true", help="compute layers again for the gradients, to save memory")
    add("--log-every", type=human_int, default=10, metavar="N", help="steps. Default: 10.")
    add("--save-every", type=human_int, default=100, metavar="N", help="steps between checkpoints. Default: 100.")
    add("--eval-every", type=human_int, default=100, metavar="N", help="steps. Default: 100.")
    add("--seed", type=human_int, default=0, metavar="N", help="Default: 0.")


def _add_heads(group: Any) -> None:
    add = group.add_argument
    add("--medusa-heads", type=human_int, metavar="K", help="train so many Medusa heads (arXiv:2401.10774)")
    add("--medusa-layers", type=human_int, metavar="N", help="residual blocks of a head. Default: 1.")
    add("--medusa-own-heads", action="store_true", help="each with an output matrix of its own; else the model's")
    add("--eagle", action="store_true", help="train an EAGLE head (arXiv:2401.15077)")
    add(
        "--eagle3",
        action="store_true",
        help="train an EAGLE-3 head (arXiv:2503.01840), which guesses among the tokens of --loss-vocab",
    )
    add(
        "--unroll",
        type=human_int,
        metavar="N",
        help="with --eagle and --eagle3: guesses of a draft that the head learns to go on from, to 5. Default: 1 with "
        "--eagle (above it is that of arXiv:2408.15766), 5 with --eagle3.",
    )
    add(
        "--classification-weight",
        type=float,
        metavar="W",
        help="with --eagle: of the cross-entropy beside the difference of features. Default: 0.1.",
    )
    add(
        "--from-model",
        action="store_true",
        help="start an EAGLE head as the best linear guess, an EAGLE-3 head as a layer of the model",
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns 0."""
    from jaxinfer.cli.convert import tidy_end
    from jaxinfer.training.distill import distill
    from jaxinfer.training.heads import train_heads
    from jaxinfer.training.job_folder import check_resume

    check_resume(arguments.output, arguments.resume)  # before anything is downloaded
    heads = _heads(arguments)
    data, training, options = _data(arguments), _training(arguments), _objective(arguments)
    _keep_programs()
    shared: dict[str, Any] = {
        "teacher_cache": arguments.teacher_cache,
        "resume": arguments.resume,
        "progress": sys.stderr.isatty(),
    }
    with tidy_end():
        teacher = find_model(arguments.teacher, arguments)
        if heads is not None:
            made = train_heads(
                teacher,
                arguments.output,
                heads,
                data,
                training,
                save_dtype=options.save_dtype,
                loss_vocab=arguments.loss_vocab,
                cache_features=arguments.cache_features,
                **shared,
            )
            print("\n".join(_told_heads(made)))
            return 0
        student = {"student": arguments.student, "student_layers": arguments.student_layers}
        done = distill(teacher, arguments.output, data, training, options, **student, **shared)
    print("\n".join(_told(done)))
    return 0


def _layers(text: str) -> "int | list[int]":
    return [int(layer) for layer in text.split(",")] if "," in text else human_int(text)


def _told(done: "Distillation") -> list[str]:
    lines = [f"{done.path}: {done.num_params:,} parameters after {done.steps:,} steps"]
    if done.final_nll is not None:
        share = "" if done.recovered is None else f": {done.recovered:.1%} of the difference recovered"
        lines.append(
            f"held-out loss in nats a token: teacher {done.teacher_nll:.4f}, student {done.start_nll:.4f} before and "
            f"{done.final_nll:.4f} after{share}"
        )
    return lines


def _told_heads(made: "TrainedHeads") -> list[str]:
    lines = [f"{made.path}: {made.num_params:,} parameters after {made.steps:,} steps"]
    lines += [f"held-out {name}: {made.before[name]:.4f} before, {made.after[name]:.4f} after" for name in made.before]
    return lines


def _heads(arguments: argparse.Namespace) -> "Eagle | Eagle3 | Medusa | None":
    from jaxinfer.training.head_kinds import Eagle, Eagle3, Medusa

    medusa = arguments.medusa_heads is not None
    if not medusa and (arguments.medusa_layers is not None or arguments.medusa_own_heads):
        raise ValueError("--medusa-layers and --medusa-own-heads need --medusa-heads, the number of heads")
    eagle = arguments.eagle or arguments.eagle3
    if not eagle and (arguments.unroll is not None or arguments.from_model):
        raise ValueError("--unroll and --from-model need --eagle or --eagle3")
    if not arguments.eagle and arguments.classification_weight is not None:
        raise ValueError("--classification-weight needs --eagle")
    if not medusa and not eagle:
        return None
    if medusa + arguments.eagle + arguments.eagle3 > 1:
        raise ValueError("give one of --medusa-heads, --eagle and --eagle3")
    if arguments.student is not None or arguments.student_layers is not None:
        raise ValueError("--student and --student-layers make a model; leave them out with --medusa-heads and --eagle")
    for_students = [
        getattr(arguments, name) for name in ("objective", "temperature", "hidden_weight", "top_k", "on_policy")
    ]
    if for_students != ["forward_kl", 1, 0, 0, 0]:
        raise ValueError(
            "--objective, --temperature, --hidden-weight, --top-k and --on-policy are for students; heads learn by the "
            "losses of their papers"
        )
    if eagle:
        given = {name: getattr(arguments, name) for name in ("unroll", "classification_weight")}
        given = {name: value for name, value in given.items() if value is not None}
        kind = Eagle if arguments.eagle else Eagle3
        return kind(**given, from_model=arguments.from_model)
    layers = 1 if arguments.medusa_layers is None else arguments.medusa_layers
    return Medusa(arguments.medusa_heads, layers, arguments.medusa_own_heads)


def _data(arguments: argparse.Namespace) -> "DataOptions":
    from jaxinfer.training.corpus import DataOptions
    from jaxinfer.training.teacher_texts import Writing

    generated = arguments.data == ["generate"]
    given = {
        "texts": arguments.num_texts,
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.sampling_temperature,
        "top_p": arguments.top_p,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if given and not generated:
        raise ValueError("--num-texts, --max-tokens, --sampling-temperature and --top-p are for --data generate")
    return DataOptions(
        files=() if generated else tuple(map(Path, arguments.data)),
        prompts=tuple(arguments.prompts),
        writing=Writing(**{"texts": 1000, "max_tokens": 256, **given}, seed=arguments.seed) if generated else None,
        answers_only=arguments.answers_only,
        seq_len=arguments.seq_len,
        eval_files=tuple(arguments.eval_data),
        eval_fraction=arguments.eval_fraction,
        seed=arguments.seed,
    )


def _training(arguments: argparse.Namespace) -> "TrainOptions":
    from jaxinfer.training.optimizer import OptimizerOptions
    from jaxinfer.training.options import TrainOptions
    from jaxinfer.training.training_run import Pace

    given = vars(arguments)
    if given["warmup_steps"] is None:
        given = {**given, "warmup_steps": 3 * arguments.steps // 100}

    def of(kind: Any) -> dict[str, Any]:
        return {field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given}

    return TrainOptions(OptimizerOptions(**of(OptimizerOptions)), Pace(**of(Pace)), **of(TrainOptions))


def _objective(arguments: argparse.Namespace) -> "DistillOptions":
    from jaxinfer.training.distill import DistillOptions

    names = [field.name for field in dataclasses.fields(DistillOptions)]
    return DistillOptions(**{name: getattr(arguments, name) for name in names})


def _keep_programs() -> None:
    """Compiled programs are kept for the next run, where the engine keeps its own."""
    from jaxinfer.cache_dir import default_cache_dir
    from jaxinfer.runner.compile_cache import enable_compile_cache

    enable_compile_cache(default_cache_dir() / "programs")
