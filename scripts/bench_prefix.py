#!/usr/bin/env python3
"""What the prefix cache saves when many questions share a system prompt, on this machine, in one run.

    python scripts/bench_prefix.py --output FILE.md

Two engines that differ in `enable_prefix_caching` only take the same prompts: a system prompt that all have in common,
and behind it a question of each one's own. Both begin with an empty cache. Only prompts are timed: every request ends
with its first token. All requests arrive at once in the first part; in the second they come one after the other, as
from one person. Exit status 1: outputs differ, or a goal is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from jaxinfer import LLM, RequestOutput, SamplingParams
from scripts.bench_peers.machine import CpuClock, machine_facts

MAX_COMPUTED = 0.08
MIN_SPEEDUP = 5.0
FIRST_TOKEN_ID = 32  # below are the control tokens of most vocabularies
LAST_TOKEN_ID = 32000


@dataclass(frozen=True)
class Part:
    """What one engine did with the prompts of one part.

    Attributes:
        computed: tokens that went through the model.
        seconds: from the first arrival to the last first token.
        first_token: mean seconds from a request's arrival to its first token.
        cached: prompt tokens that `num_cached_tokens` says were in the cache.
        token_ids: of every request.
        other_load: share of the machine's cores that was busy with something else meanwhile, 0 to 1.
    """

    computed: int
    seconds: float
    first_token: float
    cached: int
    token_ids: list[int]
    other_load: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; returns the exit status."""
    args = parse_args(argv)
    prompts = make_prompts(args)
    sizes = {"max_model_len": len(prompts[0]) + 1, "max_num_seqs": args.max_num_seqs, "use_tqdm_on_load": False}
    engines = {caching: LLM(args.model, enable_prefix_caching=caching, **sizes) for caching in (False, True)}
    together = {caching: measure(llm, [prompts]) for caching, llm in engines.items()}
    engines[True].reset_prefix_cache()
    single = [[prompt] for prompt in prompts[: args.single]]
    alone = {caching: measure(llm, single) for caching, llm in engines.items()}
    lines = list(report(args, together, alone))
    print("\n".join(lines))
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")
    return 0 if is_good(together, alone) else 1


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--system-len", type=int, default=1024, help="tokens that all prompts begin with")
    parser.add_argument("--questions", type=int, default=64, help="requests that arrive at once")
    parser.add_argument("--question-len", type=int, default=32, help="tokens of each one's own")
    parser.add_argument("--single", type=int, default=8, help="requests that come one after the other")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="requests that run at the same time")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts")
    parser.add_argument("--output", type=Path, help="also write the report there, as Markdown")
    return parser.parse_args(argv)


def make_prompts(args: argparse.Namespace) -> list[list[int]]:
    """Random ids: a common beginning, and an end of each one's own."""
    rng = random.Random(args.seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(count)]

    system = tokens(args.system_len)
    return [system + tokens(args.question_len) for _ in range(args.questions)]


def measure(llm: LLM, calls: Sequence[list[list[int]]]) -> Part:
    """Serves the prompts of one call after the other, a greedy token each."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    before, clock, start = llm.stats(), CpuClock(os.getpid()), time.perf_counter()
    outputs: list[RequestOutput] = []
    for prompts in calls:
        outputs += llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    metrics = [output.metrics for output in outputs]
    waits = [item.first_token_time - item.arrival_time for item in metrics if item and item.first_token_time]
    return Part(
        computed=llm.stats().num_computed_tokens - before.num_computed_tokens,
        seconds=seconds,
        first_token=statistics.mean(waits),
        cached=sum(output.num_cached_tokens or 0 for output in outputs),
        token_ids=[output.outputs[0].token_ids[0] for output in outputs],
        other_load=clock.other_load(os.cpu_count() or 1),
    )


def is_good(together: dict[bool, Part], alone: dict[bool, Part]) -> bool:
    """The outputs are the same, and the goals are met."""
    same = all(part[False].token_ids == part[True].token_ids for part in (together, alone))
    computed = together[True].computed / together[False].computed
    return same and computed <= MAX_COMPUTED and together[False].seconds / together[True].seconds >= MIN_SPEEDUP


def report(args: argparse.Namespace, together: dict[bool, Part], alone: dict[bool, Part]) -> Iterator[str]:
    """The Markdown, line by line."""
    yield "# Prefix cache: many questions behind one system prompt"
    yield ""
    for name, value in machine_facts(args.max_num_seqs).items():
        if name != "cores":
            yield f"* {name}: {value}"
    yield f"* {args.model}, float32; a system prompt of {args.system_len} tokens, questions of {args.question_len}"
    yield "* each request ends with its first token; both engines begin with an empty cache"
    yield ""
    yield "| | cache off | cache on | ratio |"
    yield "|---|---|---|---|"
    for title, part in ((f"{args.questions} at once", together), (f"{args.single} one by one", alone)):
        cold, warm = part[False], part[True]
        yield f"| {title}: tokens computed | {cold.computed} | {warm.computed} | {warm.computed / cold.computed:.1%} |"
        yield f"| {title}: prompt tokens from the cache | {cold.cached} | {warm.cached} | |"
        ratio = _times(cold.seconds, warm.seconds)
        yield f"| {title}: all prompts, s | {cold.seconds:.2f} | {warm.seconds:.2f} | {ratio} |"
        yield (
            f"| {title}: mean time to first token, s | {cold.first_token:.3f} | {warm.first_token:.3f} | "
            f"{_times(cold.first_token, warm.first_token)} |"
        )
        yield f"| {title}: cores busy with others | {cold.other_load:.0%} | {warm.other_load:.0%} | |"
    yield ""
    same = all(part[False].token_ids == part[True].token_ids for part in (together, alone))
    yield f"Outputs are {'the same' if same else 'NOT the same'}."
    yield (
        f"Goals: at most {MAX_COMPUTED:.0%} of the tokens computed and {MIN_SPEEDUP:.0f} times the speed, all at once: "
        f"{'met' if is_good(together, alone) else 'MISSED'}."
    )


def _times(before: float, after: float) -> str:
    return f"{before / after:.1f} times as fast"


if __name__ == "__main__":
    sys.exit(main())
