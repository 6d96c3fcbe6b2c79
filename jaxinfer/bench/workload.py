"""Workloads for measuring throughput: prompts of random tokens, and how many tokens each asks for."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LengthRange:
    """Lengths in tokens, drawn uniformly from `low` to `high`, both included.

    Raises:
        ValueError: `low` is below 1 or above `high`.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(
                f"lengths from {self.low} to {self.high}: the first must be at least 1, the second no less"
            )


@dataclass(frozen=True)
class Workload:
    """Requests that are there from the beginning.

    Attributes:
        prompts: token ids.
        output_lens: tokens to generate for each.
    """

    prompts: list[list[int]]
    output_lens: list[int]


def random_workload(
    num_prompts: int, input_len: LengthRange, output_len: LengthRange, *, vocab_size: int, max_model_len: int, seed: int
) -> Workload:
    """Prompts of ids drawn uniformly from the vocabulary; the same for the same arguments.

    Raises:
        ValueError: there is no prompt, or the longest request exceeds `max_model_len`.
    """
    if num_prompts < 1:
        raise ValueError(f"num_prompts={num_prompts} must be at least 1")
    longest = input_len.high + output_len.high
    if longest > max_model_len:
        raise ValueError(
            f"{input_len.high} prompt and {output_len.high} output tokens exceed max_model_len={max_model_len}; "
            "choose shorter ones"
        )
    rng = np.random.default_rng(seed)
    input_lens = rng.integers(input_len.low, input_len.high, num_prompts, endpoint=True)
    output_lens = rng.integers(output_len.low, output_len.high, num_prompts, endpoint=True)
    prompts = [rng.integers(0, vocab_size, length).tolist() for length in input_lens]
    return Workload(prompts, output_lens.tolist())
