"""What trained drafts and heads are worth on held-out chat prompts: tokens a step, and what guesses and checks cost.

Run from the repository, with what scripts/train_speculation.sh made:
python scripts/bench_trained.py draft_model:DIR:5 medusa:DIR:16 eagle:DIR:24 [--quantization int8_w8a8] ...
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinfer import LLM, SamplingParams

PROMPTS = Path(__file__).parent / "data" / "held_out_prompts.json"
CHUNK = 128
SIZES = {"max_num_seqs": 1, "max_num_batched_tokens": CHUNK, "max_model_len": 512, "use_tqdm_on_load": False}


@dataclass(frozen=True)
class Measured:
    """Of all prompts, one after the other.

    Attributes:
        ids: of each answer.
        steps: that drew tokens of the answers.
        seconds: on the wall.
        draft_ms, verify_ms: means of a guess and of a step that verifies one; 0 without.
        rates: how often a draft's token at each depth was right.
    """

    ids: list[list[int]]
    steps: int
    seconds: float
    draft_ms: float
    verify_ms: float
    rates: list[float]

    @property
    def tokens_a_step(self) -> float:
        return sum(map(len, self.ids)) / self.steps


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="METHOD:DIR:TOKENS", help="with ngram: ngram::5")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--quantization", help="as for the engine, int8_w8a8 for example")
    parser.add_argument("--length", type=int, default=96, help="tokens generated for each prompt")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--num-prompts", type=int, help="only so many of them")
    options = parser.parse_args(arguments)
    prompts = json.loads(options.prompts.read_text())[: options.num_prompts]
    engine = {"model": options.model, "quantization": options.quantization, **SIZES}
    plain = measure(engine, prompts, options.length)
    step = 1000 * plain.seconds / plain.steps
    print(f"{len(prompts)} prompts, {sum(map(len, plain.ids))} tokens, plain steps of {step:.1f} ms\n", flush=True)
    print("| method | tokens | tokens a step | right by depth | same ids | guess ms | verify ms | implied | measured |")
    print("|---|---:|---:|---|---:|---:|---:|---:|---:|", flush=True)
    for case in options.cases:
        method, folder, tokens = case.split(":")
        guess: dict[str, Any] = {"method": method, "num_speculative_tokens": int(tokens)}
        if folder:
            guess["model"] = folder
        found = measure({**engine, "speculative_config": guess}, prompts, options.length)
        print(row(method, int(tokens), found, plain), flush=True)


def row(method: str, tokens: int, found: Measured, plain: Measured) -> str:
    """A line of the table. "implied" is what tokens a step and the costs of a guess and a verification give."""
    step = 1000 * plain.seconds / plain.steps
    cost = (found.draft_ms + found.verify_ms) / step
    same = sum(one == other for one, other in zip(found.ids, plain.ids, strict=True))
    rates = " ".join(f"{rate:.2f}" for rate in found.rates)
    return (
        f"| {method} | {tokens} | {found.tokens_a_step:.2f} | {rates} | {same} of {len(plain.ids)} | "
        f"{found.draft_ms:.1f} | {found.verify_ms:.1f} | {found.tokens_a_step / cost:.2f} | "
        f"{plain.seconds / found.seconds:.2f} |"
    )


def measure(engine: dict[str, Any], prompts: list[str], length: int) -> Measured:
    """Answers all prompts with one engine, greedily."""
    params = SamplingParams(temperature=0, max_tokens=length)
    with LLM(**engine) as llm:
        llm.generate("warm", SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        steps, ids, seconds = 0, [], 0.0
        for prompt in prompts:
            before, began = llm.stats(), time.perf_counter()
            (output,) = llm.chat([{"role": "user", "content": prompt}], params, use_tqdm=False)
            seconds += time.perf_counter() - began
            ids.append(list(output.outputs[0].token_ids))
            chunks = -(-(len(output.prompt_token_ids or ()) - (output.num_cached_tokens or 0)) // CHUNK)
            steps += llm.stats().num_steps - before.num_steps - (chunks - 1)
        stats = llm.stats().speculation
    if stats is None or not stats.num_drafts:
        return Measured(ids, steps, seconds, 0.0, 0.0, [])
    draft, verify = (1000 * total / stats.num_drafts for total in (stats.draft_seconds, stats.verify_seconds))
    return Measured(ids, steps, seconds, draft, verify, list(stats.acceptance_rate_per_position))


if __name__ == "__main__":
    main()
