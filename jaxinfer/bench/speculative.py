"""What guessing ahead gains: an engine that guesses beside one that does not, on the same prompts in turn."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxinfer.engine.replicas import AnyEngine
from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams
from jaxinfer.serving.inputs import TokenizedPrompt
from jaxinfer.serving.request_loop import RequestLoop


@dataclass
class DecodeTimes:
    """Of the steps after all requests of a batch have their first token, summed over batches.

    Attributes:
        num_tokens: drawn in them.
        num_rows: steps of each request, added up; without guesses as many as tokens.
        num_steps: of the device.
        seconds: on the wall.
        device_seconds: the device's time for its steps.
        num_verifying: steps that verified guesses.
        draft_seconds, verify_seconds: of guessing and of such steps.
        drafted, accepted: by position, as in `SpeculationStats`.
        token_ids: of each request, first tokens included.
    """

    num_tokens: int = 0
    num_rows: int = 0
    num_steps: int = 0
    seconds: float = 0.0
    device_seconds: float = 0.0
    num_verifying: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a request got in a step of the model, on average."""
        return self.num_tokens / self.num_rows if self.num_rows else 0.0

    @property
    def step_ms(self) -> float:
        """The device's time for a step."""
        return 1000 * self.device_seconds / self.num_steps if self.num_steps else 0.0


@dataclass(frozen=True)
class Comparison:
    """One method beside plain decoding.

    Attributes:
        method, num_tokens, batch_size: what was measured; `num_tokens` guesses a request and step at most.
        guessing, plain: times of both, of the same requests.
    """

    method: str
    num_tokens: int | str
    batch_size: int
    guessing: DecodeTimes
    plain: DecodeTimes

    @property
    def speedup(self) -> float:
        """Tokens a second over those of plain decoding, both measured."""
        times = self.guessing.seconds * self.plain.num_tokens
        return self.plain.seconds * self.guessing.num_tokens / times if times else 0.0

    @property
    def draft_ms(self) -> float:
        """Wall time of guessing, for each step that verifies."""
        return 1000 * self.guessing.draft_seconds / max(self.guessing.num_verifying, 1)

    @property
    def verify_ms(self) -> float:
        """The device's time of such a step."""
        return 1000 * self.guessing.verify_seconds / max(self.guessing.num_verifying, 1)

    @property
    def implied_speedup(self) -> float:
        """What tokens a step and the measured times of guesses and steps would make of it if the host took no other
        time: tokens a step, times a plain step's time, over that of a step with its guess (plain steps, where nothing
        was guessed, counted as such)."""
        times, plain_ms = self.guessing, self.plain.step_ms
        cost = 1000 * (times.draft_seconds + times.verify_seconds) + (times.num_steps - times.num_verifying) * plain_ms
        return times.tokens_per_step * plain_ms * times.num_steps / cost if cost else 0.0

    @property
    def rates(self) -> list[float]:
        """Share of guesses that were right, by position (in a tree: depth)."""
        return [right / made for right, made in zip(self.guessing.accepted, self.guessing.drafted, strict=True) if made]

    @property
    def num_same(self) -> int:
        """Requests whose output is that of plain decoding, token by token."""
        pairs = zip(self.guessing.token_ids, self.plain.token_ids, strict=True)
        return sum(one == other for one, other in pairs)

    def as_dict(self) -> dict[str, object]:
        """Everything by name; times in milliseconds."""
        return {
            "method": self.method,
            "num_speculative_tokens": self.num_tokens,
            "batch_size": self.batch_size,
            "num_requests": len(self.plain.token_ids),
            "num_same_outputs": self.num_same,
            "tokens_per_step": self.guessing.tokens_per_step,
            "acceptance_rate_per_position": self.rates,
            "draft_ms": self.draft_ms,
            "verify_ms": self.verify_ms,
            "plain_step_ms": self.plain.step_ms,
            "plain_tokens_per_second": self.plain.num_tokens / self.plain.seconds if self.plain.seconds else 0.0,
            "tokens_per_second": self.guessing.num_tokens / self.guessing.seconds if self.guessing.seconds else 0.0,
            "speedup": self.speedup,
            "implied_speedup": self.implied_speedup,
        }


def compare(
    name: tuple[str, int | str],
    engines: tuple[AnyEngine, AnyEngine],
    prompts: Sequence[TokenizedPrompt],
    batch_size: int,
    params: SamplingParams,
    on_batch: Callable[[], None] = lambda: None,
) -> Comparison:
    """Serves the prompts in batches, each by both engines one after the other, beginning with either in turn.

    Args:
        name: method and number of guesses.
        engines: the one that guesses, and a plain one; warmed up.
        prompts: the last batch is filled up with the first of them.
        batch_size: requests at the same time.
        params: of every request; should ignore end-of-sequence ids, so that batches stay full.
        on_batch: called after each batch.

    Raises:
        RuntimeError: a request failed.
        KeyboardInterrupt: on Ctrl-C, between two steps.
    """
    times = DecodeTimes(), DecodeTimes()
    for number, first in enumerate(range(0, len(prompts), batch_size)):
        batch = [prompts[(first + place) % len(prompts)] for place in range(batch_size)]
        for which in (0, 1) if number % 2 else (1, 0):
            engines[which].reset_prefix_cache()
            serve_batch(engines[which], batch, params, times[which])
        on_batch()
    return Comparison(*name, batch_size, *times)


def num_batches(num_prompts: int, batch_size: int) -> int:
    """How many `compare` serves."""
    return -(-num_prompts // batch_size)


def serve_batch(
    engine: AnyEngine, prompts: Sequence[TokenizedPrompt], params: SamplingParams, times: DecodeTimes
) -> None:
    """Serves requests that come at once, and adds what their decoding takes to `times`."""
    params = params.clone()
    params.output_kind = RequestOutputKind.DELTA
    tokens: list[list[int]] = [[] for _ in prompts]
    began, before = 0.0, None
    with RequestLoop(engine) as loop:
        for place, prompt in enumerate(prompts):
            loop.add(str(place), prompt, params)
        while len(loop):
            outputs = loop.step()
            for output in outputs:
                sample = output.outputs[0]
                if sample.finish_reason == "error":
                    raise RuntimeError(f"request {output.request_id} failed: {output.error}")
                tokens[int(output.request_id)] += sample.token_ids
                if before is not None and sample.token_ids:
                    times.num_rows += 1
                    times.num_tokens += len(sample.token_ids)
            if before is None and all(tokens):
                began, before = time.perf_counter(), engine.stats()
    times.token_ids += tokens
    if before is None:
        return
    after = engine.stats()
    times.seconds += time.perf_counter() - began
    times.num_steps += after.num_steps - before.num_steps
    times.device_seconds += after.device_seconds - before.device_seconds
    if after.speculation is not None and before.speculation is not None:
        new, old = after.speculation, before.speculation
        times.num_verifying += new.num_verify_steps - old.num_verify_steps
        times.draft_seconds += new.draft_seconds - old.draft_seconds
        times.verify_seconds += new.verify_seconds - old.verify_seconds
        _add(times.drafted, new.num_drafted_per_position, old.num_drafted_per_position)
        _add(times.accepted, new.num_accepted_per_position, old.num_accepted_per_position)


def _add(total: list[int], new: Sequence[int], old: Sequence[int]) -> None:
    """Adds the difference of two lists that grow."""
    total += [0] * (len(new) - len(total))
    for place, value in enumerate(new):
        total[place] += value - (old[place] if place < len(old) else 0)
