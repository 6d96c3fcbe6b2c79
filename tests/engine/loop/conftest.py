"""A device in numpy and a tokenizer in a dict, so that the whole engine loop runs without JAX."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from jaxinfer.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.plan import RowLogprobs, RowResult, ScheduledRow, StepPlan, StepResult
from jaxinfer.engine.request import Request
from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams
from jaxinfer.models.config import ModelConfig

Logits = Callable[[Sequence[int]], np.ndarray]

# SmolLM2 ids and pieces that the field cases name, then 26 letters.
PIECES: dict[int, bytes] = {
    0: b"<|endoftext|>",
    1: b"<|im_start|>",
    2: b"<|im_end|>",
    10: b"DEF",
    11: b"DE",
    12: b"hel",
    13: b"lo",
    14: b" wor",
    15: b"ld",
    16: b"\xf0\x9f",
    17: b"\x98",
    18: b"\x80",
    19: b" described",
    20: b"desc",
    21: b"ribed",
    22: b" London",
    23: b"London",
    24: b"\n",
    25: b" ",
    **{30 + i: bytes([97 + i]) for i in range(26)},
}
VOCAB_SIZE = 64


class DictTokenizer:
    """Ids from PIECES by longest match; ids without a piece decode to "?"."""

    vocab_size = VOCAB_SIZE
    bos_token_id = 1
    eos_token_id = 2
    pad_token_id = 2
    all_special_ids = frozenset({0, 1, 2})
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        data, ids = text.encode(), []
        while data:
            token = max((i for i, piece in PIECES.items() if data.startswith(piece)), key=lambda i: len(PIECES[i]))
            ids.append(token)
            data = data[len(PIECES[token]) :]
        return ids

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, spaces_between_special_tokens: bool = True
    ) -> str:
        kept = (i for i in token_ids if not (skip_special_tokens and i in self.all_special_ids))
        return b"".join(PIECES.get(i, b"?") for i in kept).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> list[int] | str:
        raise ValueError("no template")


DICT_TOKENIZER = DictTokenizer()


def history_logits(context: Sequence[int]) -> np.ndarray:
    """Logits that depend on every token of the context and its place."""
    return np.random.default_rng([len(context), *context]).normal(size=VOCAB_SIZE)


def scripted_logits(script: Mapping[int, int]) -> Logits:
    """After token t comes script[t]; the next best is the id above it."""

    def logits(context: Sequence[int]) -> np.ndarray:
        values = -np.arange(VOCAB_SIZE, dtype=float) / 1000
        if context[-1] in script:
            values[script[context[-1]]] = 10.0
            values[(script[context[-1]] + 1) % VOCAB_SIZE] = 5.0
        return values

    return logits


def script_of(*tokens: int) -> Logits:
    """The prompt [1] is followed by these tokens, then by letters from "a" on."""
    chain = [1, *tokens, 30]
    return scripted_logits({i: i + 1 for i in range(30, 55)} | dict(pairwise(chain)))


def draw(logits: np.ndarray, request: Request, context: Sequence[int]) -> int | None:
    """The token a correct sampler takes, None when the request's rules leave none."""
    params, output = request.params, list(context[request.num_prompt_tokens :])
    scores = logits.copy()
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    if params.allowed_token_ids is not None:
        scores[np.setdiff1d(np.arange(VOCAB_SIZE), params.allowed_token_ids)] = -np.inf
    for *before, last in params.bad_words_token_ids:
        if not before or output[-len(before) :] == before:
            scores[last] = -np.inf
    if len(output) < params.min_tokens:
        scores[[*request.eos_token_ids, *params.stop_token_ids]] = -np.inf
    if scores.max() == -np.inf:
        return None
    if not params.is_greedy:
        rng = np.random.default_rng([request.seed, request.child_index, len(context)])
        scores = scores / params.temperature + rng.gumbel(size=VOCAB_SIZE)
    return int(np.argmax(scores))


def row_logprobs(logits: np.ndarray, targets: Sequence[int], count: int) -> RowLogprobs:
    """What a runner returns for one or more logits rows [Q, V]; it always brings a few more than asked for."""
    logits = np.atleast_2d(logits)
    values = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    best = np.argsort(-values, axis=-1, kind="stable")[:, : VOCAB_SIZE if count == -1 else count + 3]
    chosen = values[np.arange(len(targets)), targets]
    return RowLogprobs(
        token_ids=best.astype(np.int32),
        logprobs=np.take_along_axis(values, best, -1).astype(np.float32),
        target_logprobs=chosen.astype(np.float32),
        target_ranks=(1 + (values > chosen[:, None]).sum(-1)).astype(np.int32),
    )


@dataclass
class Pending:
    device: "NumpyDevice"
    number: int
    rows: tuple[RowResult, ...]

    def is_ready(self) -> bool:
        return not self.device.is_busy()

    def result(self) -> StepResult:
        self.device.events.append(("result", self.number))
        if self.device.fail_in_result_of == self.number:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1234 bytes")
        return StepResult(self.rows, device_seconds=0.001)


@dataclass
class NumpyDevice:
    """A Runner whose KV pool holds token ids, so that wrong blocks, positions or slots give wrong tokens."""

    config: EngineConfig
    logits: Logits
    num_compiled: int = 0
    events: list[tuple[str, int]] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    fail_in_result_of: int = -1
    fail_in_execute_of: int = -1
    poison: set[str] = field(default_factory=set)
    is_busy: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.pool = np.full((self.config.cache.num_blocks, self.config.cache.block_size), -1)
        self.last_drawn = np.full(self.config.scheduler.max_num_seqs, -1)

    def execute(self, plan: StepPlan) -> Pending:
        number = len(self.plans)
        self.plans.append(plan)
        self.events.append(("execute", number))
        if number == self.fail_in_execute_of:
            raise RuntimeError("INTERNAL: kernel launch failed")
        for source, target in plan.copies:
            self.pool[target] = self.pool[source]
        # As in a layer of a step: everything is written before anything is read.
        for row in plan.rows:
            self._write(row)
        return Pending(self, number, tuple(self._run(row) for row in plan.rows))

    def _write(self, row: ScheduledRow) -> None:
        request, stop = row.request, row.start + row.num_tokens
        known = request.token_ids(row.start, stop - row.token_on_device)
        new = [*known, int(self.last_drawn[request.slot])] if row.token_on_device else known
        assert len(new) == row.num_tokens and min(new) >= 0
        size = self.config.cache.block_size
        for position, token in zip(range(row.start, stop), new, strict=True):
            block = request.block_ids[position // size]
            self.pool[block, position % size] = token

    def _run(self, row: ScheduledRow) -> RowResult:
        request, stop = row.request, row.start + row.num_tokens
        size = self.config.cache.block_size
        context = [int(self.pool[request.block_ids[p // size], p % size]) for p in range(stop)]
        logprobs = prompt_logprobs = token = None
        drawn: int | None = 0
        params = request.params
        if row.num_scored:
            targets = request.prompt_token_ids[row.start + 1 : row.start + 1 + row.num_scored]
            rows = [self.logits(context[: row.start + 1 + i]) for i in range(row.num_scored)]
            prompt_logprobs = row_logprobs(np.stack(rows), targets, params.prompt_logprobs or 0)
        if row.samples:
            logits = self.logits(context)
            drawn = draw(logits, request, context)
            token = 0 if drawn is None else drawn
            self.last_drawn[request.slot] = token
            if params.logprobs is not None:
                logprobs = row_logprobs(logits, [token], params.logprobs)
        finite = request.request_id not in self.poison
        return RowResult(token, finite, logprobs, prompt_logprobs, allowed=drawn is not None)


@dataclass
class Harness:
    """An engine on a numpy device."""

    engine: Engine
    device: NumpyDevice
    tokenizer: Any

    def add(
        self, request_id: str, prompt: Sequence[int] = (1,), params: SamplingParams | None = None, **kw: Any
    ) -> None:
        self.engine.add_request(request_id, prompt, params or SamplingParams(temperature=0), **kw)

    def run(self, limit: int = 10_000) -> dict[str, list[RequestOutput]]:
        """Steps until nothing is left; every output by request."""
        outputs: dict[str, list[RequestOutput]] = {}
        for _ in range(limit):
            if not self.engine.has_unfinished_requests():
                return outputs
            for output in self.engine.step():
                outputs.setdefault(output.request_id, []).append(output)
        raise AssertionError(f"not finished after {limit} steps")

    def generate(self, prompt: Sequence[int] = (1,), **params: Any) -> RequestOutput:
        """One request alone, its last output."""
        values = {"temperature": 0.0, "output_kind": RequestOutputKind.FINAL_ONLY, **params}
        self.add("only", prompt, SamplingParams(**values))
        (output,) = self.run()["only"]
        assert output.finished
        return output

    def check_idle(self) -> None:
        """Every block is back."""
        manager = self.engine.scheduler.block_manager
        self.engine.scheduler.check_integrity()
        assert manager.num_free_blocks == manager.num_blocks
        assert self.engine.scheduler.num_running == self.engine.scheduler.num_waiting == 0


@pytest.fixture
def make_harness() -> Callable[..., Harness]:
    def make(
        logits: Logits = history_logits,
        *,
        eos: Iterable[int] = (),
        num_blocks: int = 64,
        block_size: int = 16,
        tokenizer: Any = DICT_TOKENIZER,
        max_logprobs: int = 20,
        seed: int = 0,
        caching: bool = True,
        clock: Callable[[], float] | None = None,
        **scheduler: Any,
    ) -> Harness:
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512, **scheduler}
        config = EngineConfig(
            model=ModelConfig(VOCAB_SIZE, 64, 64, 1, 1),
            cache=CacheConfig(block_size, num_blocks, enable_prefix_caching=caching),
            scheduler=SchedulerConfig(**limits),
            runner=RunnerConfig(max_logprobs=max_logprobs),
            seed=seed,
        )
        device = NumpyDevice(config, logits)
        timed = {} if clock is None else {"clock": clock}
        return Harness(Engine(config, device, tokenizer, eos_token_ids=frozenset(eos), **timed), device, tokenizer)

    return make


@pytest.fixture
def script() -> Callable[..., Logits]:
    return script_of


def generate_naively(
    logits: Logits,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    eos: Iterable[int] = (),
    limit: int = 512,
    child_index: int = 0,
) -> list[int]:
    """One sequence, no cache, no batch, no scheduler: the ids the engine must return."""
    eos_ids = frozenset() if params.ignore_eos else frozenset(eos)
    request = Request("naive", list(prompt), params, 0.0, limit, eos_ids, params.seed or 0, child_index)
    context = list(prompt)
    while len(context) < limit:
        num_output = len(context) - len(prompt)
        if num_output == params.max_tokens:
            break
        token = draw(logits(context), request, context)
        assert token is not None
        context.append(token)
        if num_output >= params.min_tokens and context[-1] in eos_ids.union(params.stop_token_ids):
            break
    return context[len(prompt) :]


@pytest.fixture
def naive() -> Callable[..., list[int]]:
    return generate_naively


@pytest.fixture
def history() -> Logits:
    return history_logits
