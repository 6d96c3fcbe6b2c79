#!/usr/bin/env python3
"""Offline speed of jaxinfer beside other engines, on this machine, in one run.

    python scripts/bench_offline.py --model MODEL \
        --peer vllm=/path/to/python:/path/to/hf_dir --peer transformers=/path/to/python:/path/to/hf_dir \
        --peer llama.cpp=/path/to/python:/path/to/file.gguf --rounds 3 --workload all --output FILE.md

Every engine lives in a process and an interpreter of its own, is loaded and warmed up once, and then takes its turn
(A B C A B C ...), so that a machine that slows down or speeds up does it to all of them; only one computes at a time.
All get the same token-id prompts, decode greedily in float32 (jaxinfer-int8 and -w8a8: such weights) and ignore EOS.
Without peers the numbers are jaxinfer's.
Use `taskset` to give them all fewer cores. Exit status 1: an engine failed (the others' numbers are still printed).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.bench_peers.machine import CpuClock, machine_facts
from scripts.bench_peers.report import Comparison, Measurement, as_json, as_markdown
from scripts.bench_peers.session import EngineError, EngineSession, EngineSpec
from scripts.bench_peers.workloads import WORKLOAD_NAMES, UntimedError, Workload, workload_named

REPOSITORY = Path(__file__).resolve().parents[1]
KINDS = {
    "jaxinfer": ("scripts.bench_peers.jaxinfer_worker", ""),
    "jaxinfer-int8": ("scripts.bench_peers.jaxinfer_worker", "int8"),
    "jaxinfer-w8a8": ("scripts.bench_peers.jaxinfer_worker", "int8_w8a8"),
    "vllm": ("scripts.bench_peers.vllm_worker", "eager"),
    "vllm-compiled": ("scripts.bench_peers.vllm_worker", "compiled"),
    "transformers": ("scripts.bench_peers.transformers_worker", "static"),
    "transformers-continuous": ("scripts.bench_peers.transformers_worker", "continuous"),
    "llama.cpp": ("scripts.bench_peers.llamacpp_worker", ""),
    "llama.cpp-f16-kv": ("scripts.bench_peers.llamacpp_worker", "f16-kv"),
}
WARM_UP_TOKENS = 8
FIRST_TOKEN_ID = 32  # below are the control tokens of most vocabularies


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison that the command line asks for; returns the exit status."""
    args = parse_args(argv)
    specs = engine_specs(args)
    with tempfile.TemporaryDirectory(prefix="bench_offline_") as temp_dir:
        comparison = compare(specs, args, args.log_dir or Path(temp_dir))
    markdown = as_markdown(comparison)
    print(json.dumps(as_json(comparison), indent=2) if args.json else markdown)
    if args.output:
        args.output.write_text(markdown + "\n")
    return 1 if comparison.failures else 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check; a bad value ends the program with argparse's status 2."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="jaxinfer's, and that of peers without their own"
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="KIND[@LABEL]=PYTHON[:MODEL]",
        help=f"another engine, its interpreter and its form of the model; may be repeated; KIND: {', '.join(KINDS)}",
    )
    parser.add_argument("--peers-only", action="store_true", help="without jaxinfer: ratios are the first peer's")
    parser.add_argument("--rounds", type=int, default=3, help="measured turns of every engine on every workload")
    parser.add_argument(
        "--workload", action="append", choices=[*WORKLOAD_NAMES, "all"], help="may be repeated; all is the default"
    )
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens of decode1, batch8 and batch32")
    parser.add_argument("--output-len", type=int, default=128, help="output tokens of decode1, batch8 and batch32")
    parser.add_argument("--vocab-size", type=int, default=32000, help="prompt ids are below this")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one load or one run of an engine")
    parser.add_argument("--log-dir", type=Path, help="keep what the engines print here")
    parser.add_argument("--json", action="store_true", help="print JSON, every run with its numbers, instead of tables")
    parser.add_argument("--output", type=Path, help="write the tables to this file too")
    args = parser.parse_args(argv)
    for field, least in (("rounds", 1), ("input_len", 1), ("output_len", 2), ("vocab_size", FIRST_TOKEN_ID + 1)):
        if getattr(args, field) < least:
            parser.error(f"--{field.replace('_', '-')} is {getattr(args, field)}: give at least {least}")
    names = args.workload or ["all"]
    args.workloads = [
        workload_named(name, args.input_len, args.output_len)
        for name in WORKLOAD_NAMES
        if name in names or "all" in names
    ]
    if args.peers_only and not args.peer:
        parser.error("--peers-only without --peer leaves nothing to run: name a peer")
    try:
        args.peers = [parse_peer(text, args.model) for text in args.peer]
    except ValueError as error:
        parser.error(str(error))
    if args.log_dir:
        args.log_dir.mkdir(parents=True, exist_ok=True)
    return args


def parse_peer(text: str, default_model: str) -> EngineSpec:
    """KIND[@LABEL]=PYTHON[:MODEL]; raises ValueError."""
    name, separator, place = text.partition("=")
    kind, _, _ = name.partition("@")
    python, _, model = place.partition(":")
    if not separator or not python:
        raise ValueError(f"--peer {text!r}: write KIND[@LABEL]=PYTHON[:MODEL]")
    if kind not in KINDS:
        raise ValueError(f"--peer {text!r}: KIND {kind!r} is unknown; the kinds are {', '.join(KINDS)}")
    module, variant = KINDS[kind]
    return EngineSpec(name, module, variant, python, model or default_model)


def engine_specs(args: argparse.Namespace) -> list[EngineSpec]:
    """Engines in running order, jaxinfer first; exits on two engines of one label."""
    own = [] if args.peers_only else [parse_peer(f"jaxinfer={sys.executable}", args.model)]
    specs = own + args.peers
    labels = [spec.label for spec in specs]
    for label in labels:
        if labels.count(label) > 1:
            sys.exit(f"two engines are called {label!r}: tell them apart as KIND@LABEL")
    return specs


def compare(specs: Sequence[EngineSpec], args: argparse.Namespace, log_dir: Path) -> Comparison:
    """Load, warm up and measure every engine; one that fails is reported and left out from then on."""
    threads = len(os.sched_getaffinity(0))
    comparison = Comparison(machine_facts(threads), [spec.label for spec in specs], list(args.workloads), args.rounds)
    sessions: list[EngineSession] = []
    try:
        for spec in specs:
            session = EngineSession(spec, log_dir, worker_environment(), args.timeout)
            sessions.append(session)
            with noting_failure(comparison, session):
                start_engine(session, args, threads)
                comparison.facts[spec.label] = {"start": f"{session.start_seconds:.1f} s"} | session.facts
        for round_number in range(args.rounds):
            for workload in args.workloads:
                for session in sessions:
                    if session.spec.label not in comparison.failures:
                        with noting_failure(comparison, session):
                            comparison.add(measure(session, workload, args, round_number, threads))
    finally:
        for session in sessions:
            session.close()
    return comparison


@contextlib.contextmanager
def noting_failure(comparison: Comparison, session: EngineSession) -> Iterator[None]:
    """Turn an UntimedError into a remark of the report, and an EngineError into a failure that ends the engine."""
    try:
        yield
    except UntimedError as error:
        comparison.untimed.append(f"{session.spec.label}: {error}")
    except EngineError as error:
        print(f"FAILED {error}", file=sys.stderr)
        comparison.failures[session.spec.label] = str(error)
        session.close()


def start_engine(session: EngineSession, args: argparse.Namespace, threads: int) -> None:
    """Load the model with room for all the workloads, then run each once with a short output."""
    print(f"starting {session.spec.label}", file=sys.stderr)
    longest = max(workload.input_len + workload.output_len for workload in args.workloads)
    most = max(workload.num_prompts for workload in args.workloads)
    session.load(threads=threads, max_model_len=-(-longest // 64) * 64, max_num_seqs=most)
    for workload in args.workloads:
        prompts = next(prompt_sets(workload, args, round_number=-1))
        session.generate(prompts, min(WARM_UP_TOKENS, workload.output_len))


def measure(
    session: EngineSession, workload: Workload, args: argparse.Namespace, round_number: int, threads: int
) -> Measurement:
    """One engine, one workload, one round."""
    sets = prompt_sets(workload, args, round_number)
    prefill_seconds = session.generate(next(sets), 1).seconds if workload.subtracts_prefill else None
    clock = CpuClock(session.pid)
    run = session.generate(next(sets), workload.output_len)
    other_load = clock.other_load(threads)
    speed = workload.tokens_per_second(run.seconds, prefill_seconds)
    print(f"round {round_number + 1} {workload.name:10} {session.spec.label:24} {speed:8.1f} tok/s", file=sys.stderr)
    return Measurement(
        session.spec.label, workload.name, round_number, speed, run.seconds, prefill_seconds, other_load, run.token_ids
    )


def prompt_sets(workload: Workload, args: argparse.Namespace, round_number: int) -> Iterator[list[list[int]]]:
    """Batches of random prompts: the same for every engine, new every round, so that no cached prefix can serve one."""
    generator = random.Random(f"{args.seed}/{workload.name}/{round_number}")
    while True:
        yield [
            [generator.randrange(FIRST_TOKEN_ID, args.vocab_size) for _ in range(workload.input_len)]
            for _ in range(workload.num_prompts)
        ]


def worker_environment() -> dict[str, str]:
    """This process's environment, with the workers importable and the engines kept off the network."""
    python_path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}
    return dict(os.environ) | offline | {"PYTHONPATH": python_path}


if __name__ == "__main__":
    sys.exit(main())
