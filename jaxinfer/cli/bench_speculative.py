"""`jaxinfer bench speculative`: what guessing ahead gains here, method by method."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.engine_loading import load
from jaxinfer.cli.engine_options import add_engine_options, engine_args, json_object
from jaxinfer.cli.human_int import human_int

if TYPE_CHECKING:
    from jaxinfer.bench.speculative import Comparison
    from jaxinfer.serving.inputs import TokenizedPrompt
    from jaxinfer.startup.loading import EngineParts

DESCRIPTION = """\
Compares methods of speculative decoding, and numbers of guesses, with plain decoding in one run. An engine that guesses
and one that does not serve the same prompts in batches of each size, taking turns; every request generates the same
number of tokens (end-of-sequence ids ignored). Compiling and the prompts' first step are not timed.

  jaxinfer bench speculative --model smollm2-135m-instruct --method ngram,lookahead -k 3,5 --batch-sizes 1,4
  jaxinfer bench speculative --model M --method medusa,draft_model --heads medusa=DIR --draft SMALL --plot speedup.png

Columns: tokens a step (of the model, for one request); how often a guess was right at each position (in a tree: at
each depth); milliseconds of a guess, of the step that verifies it and of a plain step, as the device has it; the
speed-up as measured, and as the columns before imply it; how many outputs are those of plain decoding. Two engines are
in memory at a time; on a GPU each gets half of gpu_memory_utilization.
"""
METHODS = ("ngram", "lookahead", "draft_model", "medusa", "eagle", "eagle3")
WITH_HEADS = ("medusa", "eagle", "eagle3")
OWN = ("seed", "max_num_seqs", "speculative_config", "speculative_model", "num_speculative_tokens")


def add_parser(kinds: Any) -> None:
    """Adds the benchmark."""
    parser = kinds.add_parser(
        "speculative",
        help="methods of speculative decoding beside plain decoding",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    listed = f"of {', '.join(METHODS)}, with commas between"
    parser.add_argument(
        "--method", type=_methods, default=("ngram",), metavar="NAMES", help=f"{listed}. Default: ngram."
    )
    parser.add_argument(
        "-k",
        "--num-speculative-tokens",
        type=_guesses,
        default=(5,),
        metavar="N,N",
        help="tokens guessed for a request in a step, or auto; of trees all nodes. Default: 5. Lookahead has its own.",
    )
    parser.add_argument(
        "--batch-sizes", type=_sizes, default=(1,), metavar="N,N", help="requests at the same time. Default: 1."
    )
    parser.add_argument(
        "--heads",
        action="append",
        default=[],
        metavar="[METHOD=]DIR",
        help="heads of medusa, eagle or eagle3; several times, with METHOD=, for several of these",
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="METHOD=JSON",
        help="further entries of a method's speculative_config, such as eagle='{\"eagle_topk\": 4}'; several times",
    )
    parser.add_argument("--draft", metavar="MODEL", help="of draft_model: folder, GGUF file, Hub id or built-in name")
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="prompts: .json or .jsonl (texts, prompt, messages), or text lines"
    )
    parser.add_argument("--num-prompts", type=human_int, metavar="N", help="only the first so many")
    parser.add_argument("--raw", action="store_true", help="texts as they are, not through the chat template")
    parser.add_argument(
        "--output-len", type=human_int, default=96, metavar="N", help="tokens of a request. Default: 96."
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy, the default")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of requests that are not greedy. Default: 0.")
    parser.add_argument("--json", action="store_true", help="print one JSON object a row instead of the table")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the table to a .md file, or all of it to .json"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw speed-up against batch size (needs matplotlib)")
    add_engine_options(parser, without=OWN)


def run(arguments: argparse.Namespace) -> int:
    """Returns 0."""
    from jaxinfer.bench.prompts import PROMPTS, read_prompts
    from jaxinfer.bench.speculative_report import markdown, plot, require_matplotlib

    cases = _cases(arguments)
    texts = list(PROMPTS) if arguments.data is None else read_prompts(arguments.data)
    texts = texts[: arguments.num_prompts]
    for path in (arguments.output, arguments.plot):
        if path is not None:
            path.touch()  # a path that cannot be written is better known before the run
    if arguments.plot is not None:
        require_matplotlib()
    comparisons = _compare_all(arguments, cases, texts)
    title = f"{Path(arguments.engine_model).name}: speculative decoding"
    _write(arguments, comparisons, markdown(comparisons))
    if arguments.plot is not None:
        plot(comparisons, title, arguments.plot)
        print(f"speed-up against batch size: {arguments.plot}", file=sys.stderr)
    return 0


def _compare_all(
    arguments: argparse.Namespace, cases: Sequence[dict[str, Any]], texts: Sequence[Any]
) -> "list[Comparison]":
    from jaxinfer.bench.speculative import compare, num_batches
    from jaxinfer.engine.sampling_params import SamplingParams
    from jaxinfer.progress_bar import ProgressBar

    most = max(arguments.batch_sizes)
    engine = {"seed": arguments.seed, "max_num_seqs": most, **_share(arguments)}
    params = SamplingParams(
        temperature=arguments.temperature,
        seed=arguments.seed,
        max_tokens=arguments.output_len,
        ignore_eos=True,
        detokenize=False,
    )
    plain = load(engine_args(arguments, **engine))
    prompts = [_tokenized(text, plain, arguments.raw) for text in texts]
    batches = sum(num_batches(len(prompts), size) for size in arguments.batch_sizes)
    comparisons: list[Comparison] = []
    bar = ProgressBar(total=len(cases) * batches, desc="Batches", disable=not sys.stderr.isatty())
    with bar:
        for case in cases:
            config = {"disable_by_batch_size": most, **case}
            guessing = load(engine_args(arguments, **engine, speculative_config=config))
            speculation = guessing.engine.config.speculation
            assert speculation is not None
            count = "auto" if speculation.is_adaptive else speculation.num_tokens
            engines = guessing.engine, plain.engine
            # First calls of everything are not timed.
            compare(("warm-up", count), engines, prompts[:1], most, _first_tokens(params))
            for size in arguments.batch_sizes:
                comparisons.append(compare((case["method"], count), engines, prompts, size, params, bar.update))
            guessing.close()
    plain.close()
    return comparisons


def _first_tokens(params: Any) -> Any:
    warm = params.clone()
    warm.max_tokens = min(8, params.max_tokens)
    return warm


def _share(arguments: argparse.Namespace) -> dict[str, Any]:
    import jax

    sized = ("kv_cache_memory_bytes", "num_gpu_blocks_override")
    if jax.default_backend() == "cpu" or any(hasattr(arguments, f"engine_{name}") for name in sized):
        return {}
    return {"gpu_memory_utilization": getattr(arguments, "engine_gpu_memory_utilization", 0.92) / 2}


def _tokenized(text: Any, parts: "EngineParts", raw: bool) -> "TokenizedPrompt":
    """A text as a user's message where there is a chat template, else as it is."""
    from jaxinfer.serving.inputs import render_chat, tokenize_prompt

    if not isinstance(text, str):
        return render_chat(text, parts.tokenizer)
    if raw or parts.tokenizer is None:
        return tokenize_prompt(text, parts.tokenizer)
    try:
        return render_chat([{"role": "user", "content": text}], parts.tokenizer)
    except ValueError:
        return tokenize_prompt(text, parts.tokenizer)


def _cases(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A speculative_config for each method and number of guesses."""
    heads, entries = _heads(arguments), _entries(arguments)
    cases: list[dict[str, Any]] = []
    for method in arguments.method:
        config: dict[str, Any] = {"method": method, **entries.get(method, {})}
        if method == "draft_model":
            if arguments.draft is None:
                raise ValueError("--method draft_model needs --draft MODEL")
            config["model"] = arguments.draft
        elif method in WITH_HEADS:
            if method not in heads:
                raise ValueError(f"--method {method} needs --heads {method}=DIR")
            config["model"] = heads[method]
        if method == "lookahead":
            cases.append(config)
        else:
            cases += [{**config, "num_speculative_tokens": count} for count in arguments.num_speculative_tokens]
    return cases


def _entries(arguments: argparse.Namespace) -> dict[str, Mapping[str, Any]]:
    """Method -> further entries."""
    read = json_object('{"eagle_topk": 4}')
    found: dict[str, Mapping[str, Any]] = {}
    for value in arguments.config:
        method, _, text = value.partition("=")
        if method not in arguments.method:
            raise ValueError(f"--config {value}: begin with one of the methods, {', '.join(arguments.method)}, and =")
        try:
            found[method] = read(text)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"--config {method}: {error}") from error
    return found


def _heads(arguments: argparse.Namespace) -> dict[str, str]:
    """Method -> folder."""
    asked = [method for method in arguments.method if method in WITH_HEADS]
    found: dict[str, str] = {}
    for value in arguments.heads:
        method, _, folder = value.partition("=")
        if folder and method in WITH_HEADS:
            found[method] = folder
        elif len(asked) == 1:
            found[asked[0]] = value
        else:
            raise ValueError(f"--heads {value}: say whose they are, as in --heads medusa=DIR")
    return found


def _write(arguments: argparse.Namespace, comparisons: "Sequence[Comparison]", table: str) -> None:
    rows = [one.as_dict() for one in comparisons]
    if arguments.output is not None:
        text = json.dumps(rows, indent=2) if arguments.output.suffix == ".json" else table
        arguments.output.write_text(text + "\n", encoding="utf-8")
    if arguments.json:
        for row in rows:
            print(json.dumps(row))
    else:
        print(table)


def _methods(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.replace("-", "_").split(",")))
    for name in names:
        if name not in METHODS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(METHODS)}")
    return names


def _guesses(text: str) -> tuple[int | str, ...]:
    return tuple(part if part == "auto" else _count(part) for part in text.split(","))


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part) for part in text.split(",")}))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)
