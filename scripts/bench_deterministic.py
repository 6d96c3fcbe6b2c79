#!/usr/bin/env python3
"""What deterministic=True costs on this machine: two engines over the same weights take the same work in turn.

    python scripts/bench_deterministic.py --output FILE.md

Every kind of work is done by both engines in each round; the best round of each counts, which on a machine that others
use as well is nearest to what a quiet one does. Outputs are greedy and end-of-sequence ids are ignored.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from jaxinfer import LLM, SamplingParams
from jaxinfer.cache_dir import default_cache_dir
from jaxinfer.checkpoint.checkpoint import open_checkpoint
from jaxinfer.checkpoint.load import load_params
from jaxinfer.checkpoint.resolve import resolve_model

SIZES: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "max_model_len": 512}
FIRST_TOKEN_ID, LAST_TOKEN_ID = 32, 32000


class Work(NamedTuple):
    """Requests that arrive at once, with prompts of so many tokens, each of which generates so many."""

    requests: int
    prompt: int
    output: int

    @property
    def tokens(self) -> int:
        """Tokens that count for the speed: those of prompts where nothing else is generated to speak of."""
        return self.requests * (self.prompt if self.output == 1 else self.output)


WORKS = (Work(1, 16, 32), Work(8, 16, 32), Work(32, 16, 32), Work(4, 480, 1))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="default: smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", help="default: float32")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--output", type=Path, metavar="FILE.md", help="write the table there, too")
    args = parser.parse_args(argv)
    path = resolve_model(args.model, cache_dir=default_cache_dir())
    params = load_params(open_checkpoint(path), args.dtype)
    engines = [
        LLM(path, params=params, deterministic=exact, enable_prefix_caching=False, enforce_eager=True, **SIZES)
        for exact in (False, True)
    ]
    best = {work: [float("inf")] * len(engines) for work in WORKS}
    for turn in range(-1, args.rounds):  # the first round compiles
        for work in WORKS:
            for place, llm in enumerate(engines):
                seconds = seconds_for(llm, work, max(turn, 0))
                best[work][place] = min(best[work][place], seconds if turn >= 0 else float("inf"))
    table = as_markdown(args, best)
    print(table)
    if args.output:
        args.output.write_text(table + "\n")
    return 0


def seconds_for(llm: LLM, work: Work, seed: int) -> float:
    """How long an engine takes for the work."""
    draw = random.Random(seed)
    prompts = [
        {"prompt_token_ids": [draw.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(work.prompt)]}
        for _ in range(work.requests)
    ]
    params = SamplingParams(temperature=0, max_tokens=work.output, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def as_markdown(args: argparse.Namespace, best: dict[Work, list[float]]) -> str:
    """The results as a table."""
    lines = [
        f"Cost of `deterministic=True`: {args.model} in {args.dtype}, best of {args.rounds} rounds.",
        "",
        "| requests x prompt + output | tokens/s | deterministic, tokens/s | takes |",
        "|---|---|---|---|",
    ]
    for work, (plain, exact) in best.items():
        speeds = f"{work.tokens / plain:.1f} | {work.tokens / exact:.1f}"
        shape = f"{work.requests} x {work.prompt} + {work.output}"
        lines.append(f"| {shape} | {speeds} | {exact / plain:.2f} times as long |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
