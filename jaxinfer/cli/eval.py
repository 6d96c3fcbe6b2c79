"""`jaxinfer eval`: what a number format does to a model's predictions."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxinfer.cli.engine_options import add_engine_options, engine_args
from jaxinfer.cli.human_int import human_int

DESCRIPTION = """\
Prints a model's perplexity on a text: the exponential of the mean negative log-probability of its tokens. The text is
cut into windows that do not see each other, and every token but a window's first is scored by the engine, through the
KV cache, as prompt_logprobs does.

--compare measures a quantised KV cache against an unquantised one: how far each token's log-probability moves (mean and
maximum, in nats), at how many places the same token is the most probable, and which layers lose most, by the relative
error of a layer's attention output when the cache of that layer alone is quantised (on the first 2048 tokens of the
first window).

--quantization measures quantised weights. With several methods, or with --compare and no KV cache dtypes, the table has
a line for each, and with --compare one for the unquantised model and how far the others are from it; --also adds
checkpoints of the same model that are quantised already. Entries of --quantization-config go to the methods that take
them. "bytes" are those of the weights as the engine holds them: on a CPU every method becomes int8, unless
--quantization-config '{"fast_form": false}' says otherwise.
"""
COMPARED = ("int8", "fp8_e4m3", "fp8_e5m2", "int4")
SIZES = (
    "max_num_seqs",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "enforce_eager",
    "max_logprobs",
    "data_parallel_size",
)
"""What the evaluation chooses itself."""


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "eval",
        help="measure perplexity on a text, and what a quantised KV cache costs",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="text in UTF-8")
    parser.add_argument(
        "--window",
        type=human_int,
        metavar="N",
        help="tokens of a window. Default: max_model_len less one, the longest prompt the model takes.",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        nargs="+",
        metavar="DTYPE",
        help="one or more KV cache dtypes: int8, fp8, fp8_e5m2, int4, float32, bfloat16, float16. Default: that of the "
        f"activations; with --compare {', '.join(COMPARED)}, as far as the device can do them.",
    )
    parser.add_argument(
        "--quantization",
        nargs="+",
        type=_names,
        default=[],
        metavar="METHOD",
        help="how the weights are stored: one or more of int8, int8_w8a8, fp8, int4, nf4, fp4, gguf, or a quantised "
        "checkpoint's own; several may be written with commas",
    )
    parser.add_argument("--also", nargs="+", default=[], metavar="MODEL", help="other checkpoints of the same model")
    parser.add_argument("--compare", action="store_true", help="against the unquantised cache or weights, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write that JSON object to a file, too")
    add_engine_options(parser, without=("kv_cache_dtype", "quantization", "data_parallel_size", *SIZES))


def run(arguments: argparse.Namespace) -> int:
    """Returns 0."""
    methods = [method for names in arguments.quantization for method in names]
    by_method = len(methods) > 1 or bool(arguments.also)
    if by_method or (methods and arguments.compare and not arguments.kv_cache_dtype):
        return _run_weights(arguments, methods)
    return _run_cache(arguments, methods[0] if methods else None)


def _run_cache(arguments: argparse.Namespace, quantization: str | None) -> int:
    args = engine_args(arguments, quantization=quantization)

    from jaxinfer.evaluation.evaluate import evaluate
    from jaxinfer.evaluation.subject import Subject
    from jaxinfer.evaluation.windows import text_windows
    from jaxinfer.startup.kv_dtype import named_kv_cache_dtype

    kv_dtypes = [named_kv_cache_dtype(name) for name in arguments.kv_cache_dtype or ()]
    text = _read_text(arguments)
    subject = Subject.find(args)
    windows = text_windows(subject.tokenizer, text, subject.window(arguments.window))
    kv_dtypes = _chosen(kv_dtypes, subject.dtype, arguments.compare)
    with _bar(len(windows) * (len(kv_dtypes) + arguments.compare), "KV cache") as progress:
        params = subject.load()
        report = evaluate(
            args,
            subject.config,
            params,
            subject.dtype,
            windows,
            kv_dtypes,
            compare=arguments.compare,
            on_window=progress,
        )
    import jax

    weights = {"quantization": args.quantization, "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params))}
    _print(arguments, {**weights, **report.as_dict()}, report.as_text())
    return 0


def _run_weights(arguments: argparse.Namespace, methods: list[str]) -> int:
    if len(arguments.kv_cache_dtype or ()) > 1:
        raise ValueError("--kv-cache-dtype: several weights are compared with one dtype of the KV cache; give one")
    options = vars(arguments).pop("engine_quantization_config", {})
    args = engine_args(arguments, kv_cache_dtype=(arguments.kv_cache_dtype or ["auto"])[0])

    from jaxinfer.evaluation.subject import Subject
    from jaxinfer.evaluation.weights import compared_subjects, evaluate_weights
    from jaxinfer.evaluation.windows import text_windows
    from jaxinfer.startup.quantization import named_method

    for method in methods:
        named_method(method)  # before the model is looked for
    text = _read_text(arguments)
    subject = Subject.find(args)
    windows = text_windows(subject.tokenizer, text, subject.window(arguments.window))
    subjects = compared_subjects(subject, methods, options, arguments.also, compare=arguments.compare)
    with _bar(len(windows) * len(subjects), "weights") as progress:
        report = evaluate_weights(subjects, windows, on_window=progress)
    _print(arguments, report.as_dict(), report.as_text())
    return 0


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _read_text(arguments: argparse.Namespace) -> str:
    text: str = arguments.text.read_text(encoding="utf-8")
    if arguments.output_json is not None:
        arguments.output_json.touch()  # a path that cannot be written is better known before the run
    return text


@contextlib.contextmanager
def _bar(total: int, what: str) -> Iterator[Callable[[str, object], None]]:
    """A progress bar on a terminal, and what to call with a name and each window."""
    from jaxinfer.progress_bar import ProgressBar

    with ProgressBar(total=total, unit="window", dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar:

        def progress(name: str, output: object) -> None:
            bar.set_description(f"{what} {name}", refresh=False)
            bar.update()

        yield progress


def _print(arguments: argparse.Namespace, report: dict[str, Any], table: str) -> None:
    values = {"model": str(arguments.engine_model), "text": str(arguments.text), **report}
    document = json.dumps(values, indent=None if arguments.json else 2)
    if arguments.output_json is not None:
        arguments.output_json.write_text(document + "\n", encoding="utf-8")
    print(document if arguments.json else table)


def _chosen(given: list[str], dtype: str, compare: bool) -> list[str]:
    """The dtypes to measure, each once; of those that nobody asked for by name the ones the device can do."""
    from jaxinfer.runner.kv_support import require_kv_dtype

    if not given and not compare:
        return [dtype]
    chosen = []
    for name in given or COMPARED:
        try:
            require_kv_dtype(name)
        except ValueError as error:
            if given:
                raise
            print(f"left out: {error}", file=sys.stderr)
            continue
        chosen.append(dtype if name == "auto" else name)
    return list(dict.fromkeys(name for name in chosen if not (compare and name == dtype)))
