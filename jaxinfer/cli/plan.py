"""`jaxinfer plan`: whether a model fits on a GPU, how it is served there, and where the memory goes."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.human_int import human_int

if TYPE_CHECKING:
    from jaxinfer.planning.recommendation import Recommendation
    from jaxinfer.runner.compiled_plan import CompiledPlan

DESCRIPTION = """\
Plans how to serve a model on a GPU, which need not be here: number of GPUs, precision of weights and KV cache, requests
at a time, and where the memory goes; by formulas, or with --compile by XLA, which compiles the engine's step programs
for that GPU. Exit status 2 where nothing fits: then it says what would.

  jaxinfer plan llama-3.1-8b --gpu h200 --context 32k --concurrency 64
  jaxinfer plan 72B --gpu "4x 4090"
  jaxinfer plan MODEL --gpu a100-80g --compile --plot plan.png
  jaxinfer plan --kv-table
"""
BAR_WIDTH = 64
_PARTS = (("weights", "#"), ("kv_cache", "="), ("sampling", "s"), ("scratch", "t"))
_LABELS = {"weights": "weights", "kv_cache": "KV cache", "sampling": "sampling", "scratch": "scratch"}


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "plan",
        help="plan a model's memory on a GPU that need not be here",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    size = {"type": human_int, "metavar": "N"}
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="billions of parameters (7B), name, folder, GGUF file or Hub id"
    )
    parser.add_argument("--gpu", help='such as "A100 80G", 4090, h200, "2x l40s"')
    parser.add_argument("--num-gpus", help="GPUs there are; by default as many as it takes, up to eight", **size)
    parser.add_argument("--tp", "--tensor-parallel-size", help="split the layers over exactly so many GPUs", **size)
    parser.add_argument("--context", help="tokens of the longest request, such as 32k (4096)", **size)
    parser.add_argument("--mean-context", help="tokens of a running request on average (a third)", **size)
    parser.add_argument("--concurrency", default=64, help="requests at the same time (64)", **size)
    quant = "fp16, fp8, int8, awq, gptq, int4, nf4 or fp4; by default the checkpoint's own, or chosen"
    parser.add_argument("--quant", "--quantization", metavar="QUANT", help=quant)
    parser.add_argument("--kv-cache-dtype", metavar="DTYPE", help="auto, int8, fp8 or int4; by default chosen")
    parser.add_argument("--max-num-batched-tokens", default=2048, help="tokens of a step (2048)", **size)
    parser.add_argument("--block-size", default=16, help="tokens of a block (16)", **size)
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.92, metavar="SHARE", help="of the card's memory (0.92)"
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile the step programs for that GPU, for exact numbers"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw memory against context (needs matplotlib)")
    parser.add_argument("--kv-table", action="store_true", help="print the KV bytes a token of public models instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, or 2 where nothing fits."""
    if arguments.kv_table:
        return _print_kv_table(arguments.json)
    if arguments.model is None or arguments.gpu is None:
        raise ValueError("give a MODEL and --gpu, such as `jaxinfer plan 7B --gpu h200`; or --kv-table")
    from jaxinfer.planning.recommend import recommend_config

    plan = recommend_config(
        arguments.gpu,
        arguments.model,
        arguments.concurrency,
        arguments.context,
        num_gpus=arguments.num_gpus,
        tp=arguments.tp,
        quant=arguments.quant,
        kv_cache_dtype=arguments.kv_cache_dtype,
        mean_context=arguments.mean_context,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        block_size=arguments.block_size,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
    )
    if plan.error is not None:
        if arguments.json:
            print(json.dumps(dict(plan), ensure_ascii=False))
        print(f"jaxinfer: error: {plan.error}", file=sys.stderr)
        return 2
    if arguments.plot is not None and plan.plan is not None:
        from jaxinfer.planning.plot import plot_plan

        plot_plan(plan.plan, f"{plan.model} on {plan.tp} x {plan.gpu}", arguments.plot)
        print(f"memory against context: {arguments.plot}", file=sys.stderr)
    compiled = _compiled(plan) if arguments.compile else None
    print(_json(plan, compiled) if arguments.json else _text(plan, compiled))
    return 0


def _compiled(plan: "Recommendation") -> "CompiledPlan":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's log says that there is no GPU
    import jax

    from jaxinfer.runner.compiled_plan import compile_plan

    jax.config.update("jax_platforms", "cpu")  # a GPU that is here is left alone
    print(f"compiling {plan.model} for {plan.gpu}: minutes for a large model", file=sys.stderr)
    assert plan.plan is not None
    return compile_plan(plan.plan, plan.gpu)


def _json(plan: "Recommendation", compiled: "CompiledPlan | None") -> str:
    facts = {**plan, "memory": dict(plan.memory or {}), "engine_arguments": dict(plan.engine_arguments or {})}
    if compiled is not None:
        facts["compiled"] = {**vars(compiled), "total": compiled.total}
    return json.dumps(facts, ensure_ascii=False)


def _text(plan: "Recommendation", compiled: "CompiledPlan | None") -> str:
    memory = dict(plan.memory or {})
    gpu = f"{plan.tp} x {plan.gpu}" if plan.tp > 1 else plan.gpu
    heading = f"{plan.model} on {gpu}: {plan.max_seqs} requests at a time, context {plan.max_model_len:,}"
    lines = [heading, "=" * len(heading), "", _memory_table(plan, memory, compiled), "", *_bar(memory, compiled), ""]
    if compiled is not None:
        lines += [
            f"XLA: a decode step is {compiled.launches} launches ({compiled.launches_a_layer} a layer) in "
            f"{compiled.command_buffers} CUDA graphs, {compiled.launches_outside_graphs} outside; the formulas are off "
            f"by {memory['total'] / compiled.total - 1:+.2%} (compiled in {compiled.compile_seconds:.0f} s)",
            "",
        ]
    lines += [
        f"at most {plan.tokens_per_second:,.0f} tokens/s while all decode, by the card's data sheet",
        *(f"* {reason}" for reason in plan.reasons),
        "",
        f"engine options: {_options(plan)}",
    ]
    return "\n".join(lines)


def _memory_table(plan: "Recommendation", memory: dict[str, int], compiled: "CompiledPlan | None") -> str:
    from jaxinfer.planning.launch_table import aligned

    cache = "16 bits" if plan.kv_cache_dtype == "auto" else plan.kv_cache_dtype
    notes = {
        "weights": f"in {plan.quant}",
        "kv_cache": f"in {cache}: {plan.kv_tokens:,} tokens, {plan.num_blocks:,} blocks of {plan.block_size}",
        "sampling": "state of each request, logits of the steps in flight",
        "scratch": f"of a step of {plan.max_num_batched_tokens:,} tokens",
        "total": f"of {_gb(memory['budget'])}, of a card of {_gb(memory['device'])}",
    }
    rows = [["each GPU", "formulas", *(["compiled"] if compiled else []), ""]]
    for part, note in notes.items():
        numbers = [_gb(memory[part]), *([_gb(getattr(compiled, part))] if compiled else [])]
        rows.append([_LABELS.get(part, part), *numbers, note])
    return aligned(rows, left=(0, len(rows[0]) - 1))


def _bar(memory: dict[str, int], compiled: "CompiledPlan | None") -> list[str]:
    """The card's memory as a line of characters, and what they stand for."""
    ends, used = [], 0
    for part, mark in _PARTS:
        used += getattr(compiled, part) if compiled else memory[part]
        ends.append((mark, round(BAR_WIDTH * used / memory["device"])))
    text = ""
    for mark, end in ends:
        text += mark * (end - len(text))
    return [f"[{text.ljust(BAR_WIDTH, '.')}]", "# weights, = KV cache, s sampling, t scratch, . left free"]


def _options(plan: "Recommendation") -> str:
    """The engine's settings as command line options; what is the default anyway is left out."""
    defaults = {"tensor_parallel_size": 1, "quantization": None, "kv_cache_dtype": "auto", "block_size": 16}
    given = (plan.engine_arguments or {}).items()
    return " ".join(
        f"--{name.replace('_', '-')} {value}"
        for name, value in given
        if name not in defaults or value != defaults[name]
    )


def _print_kv_table(as_json: bool) -> int:
    from jaxinfer.planning.kv_table import KV_DTYPES, kv_table

    table = kv_table()
    if as_json:
        print(json.dumps(table))
        return 0
    from jaxinfer.planning.launch_table import aligned

    columns = ("16 bits" if dtype == "auto" else dtype for dtype in KV_DTYPES)
    rows: list[Sequence[str]] = [("model", "attention", "heads", *columns, "as MHA", "as MQA")]
    for row in table:
        sizes = (f"{row['bytes_per_token'][dtype]:,}" for dtype in KV_DTYPES)
        heads = f"{row['heads']} / {row['kv_heads']}"
        rows.append((row["model"], row["attention"], heads, *sizes, f"{row['mha']:,}", f"{row['mqa']:,}"))
    print("KV bytes a token. Heads: query / KV. Codes have a float32 scale for each key and value of a head.")
    print("As MHA, as MQA: in 16 bits, if there were a KV head for each query head, or one for all.\n")
    print(aligned(rows, left=(0, 1)))
    return 0


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
