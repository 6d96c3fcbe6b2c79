"""What bench_offline.py measures."""

from __future__ import annotations

from dataclasses import dataclass

WORKLOAD_NAMES = ("decode1", "batch8", "batch32", "prefill512")


class UntimedError(Exception):
    """A run was too short for its speed to be told."""


@dataclass(frozen=True)
class Workload:
    """`num_prompts` requests handed over together, each `input_len` prompt tokens and `output_len` output tokens."""

    name: str
    title: str
    num_prompts: int
    input_len: int
    output_len: int

    @property
    def subtracts_prefill(self) -> bool:
        """Whether the time of a run with one output token is taken off, leaving `output_len - 1` decode steps."""
        return self.name == "decode1"

    @property
    def counts_prompt(self) -> bool:
        """Whether prompt tokens are what is counted, and not output tokens."""
        return self.name == "prefill512"

    def tokens_per_second(self, seconds: float, prefill_seconds: float | None = None) -> float:
        """Speed of a run of `seconds`; UntimedError where the prefill took no less than the whole."""
        if self.counts_prompt:
            return self.num_prompts * self.input_len / seconds
        if not self.subtracts_prefill:
            return self.num_prompts * self.output_len / seconds
        if prefill_seconds is None or seconds <= prefill_seconds:
            raise UntimedError(
                f"{self.name}: {self.output_len} tokens took {seconds:.3f} s and the first alone {prefill_seconds} s, "
                "so decoding cannot be timed: raise --output-len"
            )
        return self.num_prompts * (self.output_len - 1) / (seconds - prefill_seconds)


def workload_named(name: str, input_len: int, output_len: int) -> Workload:
    """The workload `name` of WORKLOAD_NAMES; the lengths do not apply to prefill512."""
    if name == "decode1":
        return Workload(name, "decode, batch 1 (tok/s after the first token)", 1, input_len, output_len)
    if name == "prefill512":
        return Workload(name, "prefill of 512 tokens (prompt tok/s)", 1, 512, 1)
    if name in ("batch8", "batch32"):
        num_prompts = int(name.removeprefix("batch"))
        title = f"{num_prompts} requests, {input_len} in, {output_len} out (output tok/s, whole run)"
        return Workload(name, title, num_prompts, input_len, output_len)
    raise ValueError(f"workload {name!r} is unknown: the workloads are {', '.join(WORKLOAD_NAMES)}")
