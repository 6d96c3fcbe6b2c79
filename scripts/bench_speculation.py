"""Speculation on repetitive text: tokens a step and seconds against plain decoding, one request at a time.

Run from the repository: python scripts/bench_speculation.py [--model smollm2-135m-instruct] [--tokens 5] ...
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxinfer import LLM, SamplingParams

PROMPTS = Path(__file__).parent / "data" / "repetitive_prompts.json"
SIZES = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 128,
    "max_model_len": 1024,
    "use_tqdm_on_load": False,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line for plain decoding and one for speculation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--quantization", help="as for the engine, int8_w8a8 for example")
    parser.add_argument("--draft", default="ngram", help="a draft model, ngram, or lookahead")
    parser.add_argument("--tokens", default="5", help="tokens guessed at a time, or auto")
    parser.add_argument("--window", type=int, nargs=3, metavar=("W", "N", "G"), help="of lookahead")
    parser.add_argument("--length", type=int, default=96, help="tokens generated for each prompt")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    options = parser.parse_args(arguments)
    prompts = json.loads(options.prompts.read_text())
    engine = {"quantization": options.quantization, **SIZES}
    plain_ids, plain = measure(LLM(options.model, **engine), prompts, options.length)
    ids, fast = measure(LLM(options.model, **engine, **method(options)), prompts, options.length)
    print(f"{len(prompts)} prompts, {sum(map(len, ids))} tokens")
    same = sum(one == other for one, other in zip(ids, plain_ids, strict=True))
    for name, line in (("plain", plain), ("speculation", fast)):
        print(f"{name:12} {line['tokens_a_step']:.2f} tokens a step, {line['seconds']:.1f} s")
    print(f"{same} of {len(ids)} outputs are the same; {plain['seconds'] / fast['seconds']:.2f} times as fast")
    print(f"accepted by position: {', '.join(f'{rate:.2f}' for rate in fast['rates'])}")


def method(options: argparse.Namespace) -> dict[str, Any]:
    """The engine's arguments for the method."""
    if options.draft != "lookahead":
        tokens = options.tokens if options.tokens == "auto" else int(options.tokens)
        return {"speculative_model": options.draft, "num_speculative_tokens": tokens}
    names = ("window_size", "ngram_size", "guess_set_size")
    return {"speculative_config": {"method": "lookahead"} | dict(zip(names, options.window or (), strict=False))}


def measure(llm: LLM, prompts: list[str], length: int) -> tuple[list[list[int]], dict[str, Any]]:
    """The ids of each prompt's answer; and tokens for each step that draws, seconds, acceptance by position."""
    params = SamplingParams(temperature=0, max_tokens=length)
    with llm:
        llm.generate("warm", SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        steps, ids, seconds = 0, [], 0.0
        for prompt in prompts:
            before, began = llm.stats(), time.perf_counter()
            (output,) = llm.chat([{"role": "user", "content": prompt}], params, use_tqdm=False)
            seconds += time.perf_counter() - began
            ids.append(output.outputs[0].token_ids)
            chunks = -(-(len(output.prompt_token_ids or ()) - (output.num_cached_tokens or 0)) // 128)
            steps += llm.stats().num_steps - before.num_steps - (chunks - 1)
        stats = llm.stats().speculation
    rates = stats.acceptance_rate_per_position if stats else []
    return ids, {"tokens_a_step": sum(map(len, ids)) / steps, "seconds": seconds, "rates": rates}


if __name__ == "__main__":
    main()
