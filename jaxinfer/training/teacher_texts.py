"""Texts that the teacher writes itself, kept on disk as they are finished."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.training.described_folder import describe_folder, write_whole

if TYPE_CHECKING:
    from jaxinfer.llm import LLM

DESCRIPTION = "texts.json"
TEXTS_PER_SHARD = 64


@dataclass(frozen=True)
class Writing:
    """How the teacher writes.

    Attributes:
        texts: how many, at least 1; prompts are taken in turn, again from the first after the last.
        max_tokens: of what it adds to a prompt, at least 1.
        temperature: at which it samples; 1 is its own distribution.
        top_p: as in `SamplingParams`.
        seed: text number i is drawn with seed + i, whatever else is running.

    Raises:
        ValueError: a number is out of range.
    """

    texts: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("texts", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")


def write_texts(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    writing: Writing,
    ends: frozenset[int],
    make_llm: Callable[[], "LLM"],
    identity: Mapping[str, Any],
    on_texts: Callable[[int], object] = lambda count: None,
) -> list[list[int]]:
    """Has the engine continue prompts, `TEXTS_PER_SHARD` at a time; those that lie in the folder already are read.

    Args:
        folder: where the texts go; another run with the same arguments may use it.
        prompts: token ids of each.
        writing: how many, how long, and how they are drawn.
        ends: ids that end a text.
        make_llm: starts the engine; called if there is anything to write. It is shut down afterwards.
        identity: of JSON's types: what the texts depend on beside the other arguments, by names that users know.
        on_texts: told how many texts have been finished.

    Returns:
        Token ids of each prompt with what was added to it, in their order.

    Raises:
        ValueError: the folder holds other texts; names the difference.
        RuntimeError: a prompt could not be served, with the reason.
    """
    own = {**asdict(writing), "prompts": hashlib.sha256(json.dumps(list(map(list, prompts))).encode()).hexdigest()[:32]}
    describe_folder(folder, DESCRIPTION, {**identity, **own, "ends": sorted(ends)})
    found: list[list[int]] = []
    llm: LLM | None = None
    try:
        for first in range(0, writing.texts, TEXTS_PER_SHARD):
            numbers = range(first, min(first + TEXTS_PER_SHARD, writing.texts))
            path = folder / f"texts_{first:08}.json"
            if not path.is_file():
                llm = llm or make_llm()
                texts = _continue(
                    llm, [list(prompts[number % len(prompts)]) for number in numbers], numbers, writing, ends
                )
                write_whole(path, json.dumps(texts))
            found += json.loads(path.read_text(encoding="utf-8"))
            on_texts(len(numbers))
    finally:
        if llm is not None:
            llm.shutdown()
    return found


def _continue(
    llm: "LLM", prompts: list[list[int]], numbers: range, writing: Writing, ends: frozenset[int]
) -> list[list[int]]:
    from jaxinfer.engine.sampling_params import SamplingParams

    params = [
        SamplingParams(
            temperature=writing.temperature,
            top_p=writing.top_p if writing.temperature else 1.0,
            max_tokens=writing.max_tokens,
            seed=writing.seed + number,
            stop_token_ids=sorted(ends),
            detokenize=False,
        )
        for number in numbers
    ]
    texts = []
    for prompt, output in zip(prompts, llm.generate(list(prompts), params, use_tqdm=False), strict=True):
        if output.error is not None:
            raise RuntimeError(f"the teacher could not continue a prompt of {len(prompt)} tokens: {output.error}")
        texts.append(prompt + list(output.outputs[0].token_ids))
    return texts
