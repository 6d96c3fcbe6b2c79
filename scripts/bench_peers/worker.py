"""The engine side of bench_offline.py: answer JSON lines on stdin with JSON lines on stdout.

Each worker module runs in the interpreter of the engine that it drives, so this module and the workers use the standard
library and that engine only. One request a line, one reply a line, in order:

    {"op": "load", "model": str, "threads": int, "max_model_len": int, "max_num_seqs": int, "variant": str}
        -> {"seconds": float, "facts": {str: str}}            facts: versions and settings for the report
    {"op": "generate", "prompts": [[int]], "max_tokens": int}
        -> {"seconds": float, "token_ids": [[int]]}   max_tokens ids a prompt, EOS ignored
    {"op": "exit"}

A request that raises is answered {"error": str}, and the worker goes on. The clock runs here, around the engine's call.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, Protocol


@dataclass(frozen=True)
class LoadRequest:
    """What to serve: `max_num_seqs` requests at once of at most `max_model_len` tokens, prompt and output together."""

    model: str
    threads: int
    max_model_len: int
    max_num_seqs: int
    variant: str


class Engine(Protocol):
    """A loaded engine."""

    def facts(self) -> dict[str, str]:
        """Versions and settings that a reader needs to judge the numbers."""

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy ids, `max_tokens` for every prompt whatever EOS says, in the order of `prompts`."""


def serve(load: Callable[[LoadRequest], Engine]) -> None:
    """Answer requests until "exit" or the end of stdin.

    Engines print banners and progress on stdout, so file descriptor 1 is pointed at stderr, and replies go to a copy.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine: Engine | None = None
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("op")
        if operation == "exit":
            return
        try:
            if operation == "load":
                start = time.perf_counter()
                engine = load(LoadRequest(**request))
                _reply(replies, {"seconds": time.perf_counter() - start, "facts": engine.facts()})
            else:
                if engine is None:
                    raise RuntimeError("no model is loaded: send 'load' first")
                _reply(replies, _timed_generate(engine, request["prompts"], request["max_tokens"]))
        except Exception as error:
            traceback.print_exc()
            _reply(replies, {"error": f"{type(error).__name__}: {error}"})


def _timed_generate(engine: Engine, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    start = time.perf_counter()
    token_ids = engine.generate(prompts, max_tokens)
    seconds = time.perf_counter() - start
    lengths = sorted({len(ids) for ids in token_ids})
    if len(token_ids) != len(prompts) or lengths != [max_tokens]:
        raise RuntimeError(
            f"asked for {len(prompts)} outputs of {max_tokens} tokens, got {len(token_ids)} of lengths {lengths}: "
            "the engine stopped early, so its speed cannot be compared"
        )
    return {"seconds": seconds, "token_ids": token_ids}


def _reply(replies: IO[str], reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()
