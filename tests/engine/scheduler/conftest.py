"""A device made of dictionaries, and an engine loop around the real scheduler.

The device keeps a token in every KV slot and draws from what it reads back through the block tables, so a block that
is reused too early, a wrong position or a stale slot changes the output. It also keeps whose salt the token has, and
compares what the prefix cache says about a block with what is in it. The reference generates a request alone, without
scheduler, blocks, slots or cache.
"""

import struct
import zlib
from collections.abc import Callable

import pytest

from jaxinfer.config import CacheConfig, SchedulerConfig
from jaxinfer.engine.plan import RowResult, StepPlan, StepResult
from jaxinfer.engine.request import Request
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.stopping import check_stop

VOCAB = 64


def draw(history: list[int], request: Request, num_output: int) -> int:
    token = zlib.crc32(bytes(history) + struct.pack("<II", request.seed, request.child_index)) % VOCAB
    endings = request.eos_token_ids.union(request.params.stop_token_ids)
    while num_output < request.params.min_tokens and token in endings:
        token = (token + 1) % VOCAB
    return token


def generate_alone(request: Request, pool_tokens: int, window: int | None = None) -> tuple[list[int], str, int | None]:
    """Output ids, finish reason and stop reason of a request that has the machine to itself."""
    history = request.token_ids(0, request.num_known_tokens)
    output = list(request.output_token_ids)
    while True:
        token = draw(history[-(window or len(history)) :], request, len(output))
        history.append(token)
        output.append(token)
        if token in request.eos_token_ids and len(output) > request.params.min_tokens:
            return output, "stop", None
        if token in request.params.stop_token_ids and len(output) > request.params.min_tokens:
            return output, "stop", token
        if len(history) >= min(request.max_total_tokens, pool_tokens + 1):
            return output, "length", None


class Device:
    def __init__(self, config: SchedulerConfig, cache: CacheConfig, window: int | None = None) -> None:
        self.config = config
        self.window = window or 10**9
        self.block_size = cache.block_size
        self.params = 0
        """Counts updates of the parameters."""
        self.pool: dict[tuple[int, int], tuple[int, str | None, int]] = {}
        """Of each slot its token, its writer's salt, and the oldest parameters that have a part in it."""
        self.last_token: dict[int, tuple[Request, int, int]] = {}
        self.poisoned: set[str] = set()

    def execute(self, plan: StepPlan) -> StepResult:
        self.check_plan(plan)
        for source, target in plan.copies:
            for offset in range(self.block_size):
                if (source, offset) in self.pool:
                    self.pool[target, offset] = self.pool[source, offset]
        written = set()
        for row in plan.rows:
            oldest = min((params for _, _, params in self.read(row.request, row.start, row.start)), default=self.params)
            for position, token in enumerate(self.new_tokens(row), row.start):
                block = row.request.block_ids[position // self.block_size]
                slot = (block, position % self.block_size)
                assert slot not in written, "two rows write to the same slot"
                written.add(slot)
                self.pool[slot] = (token, row.request.cache_salt, oldest)
        return StepResult(tuple(self.result(row) for row in plan.rows), device_seconds=0.0)

    def read(self, request: Request, start: int, stop: int) -> list[tuple[int, str | None, int]]:
        """The slots that tokens from `start` on see before `stop`."""
        positions = range(max(0, start - self.window + 1), stop)
        size = self.block_size
        return [self.pool[request.block_ids[position // size], position % size] for position in positions]

    def new_tokens(self, row) -> list[int]:
        request, stop = row.request, row.start + row.num_tokens
        if not row.token_on_device:
            tokens = request.token_ids(row.start, stop)
            assert len(tokens) == row.num_tokens, "the host does not know these tokens"
            return tokens
        owner, admission, token = self.last_token[request.slot]
        assert owner is request and admission == request.admission, "the slot's last token is another request's"
        return [*request.token_ids(row.start, stop - 1), token]

    def result(self, row) -> RowResult:
        """Reads all that the row's tokens see, and draws from what the last one sees."""
        request, stop = row.request, row.start + row.num_tokens
        if not row.samples and self.window > stop:
            return RowResult(None)
        read = self.read(request, row.start, stop)
        history = [token for token, _, _ in read]
        known = request.token_ids(stop - len(read), min(stop, request.num_known_tokens))
        assert history[: len(known)] == known, "a request reads what is not its own history"
        assert {salt for _, salt, _ in read} == {request.cache_salt}, "a request reads what another salt has written"
        if not row.samples:
            return RowResult(None)
        token = draw(history[-self.window :], request, stop - request.num_prompt_tokens)
        self.last_token[request.slot] = (request, request.admission, token)
        return RowResult(token, finite=request.request_id not in self.poisoned)

    def check_cache(self, blocks: dict[int, bytes]) -> None:
        """Every block that can be found holds the ids that its key ends in, made by the latest parameters alone."""
        for block, key in blocks.items():
            held, _, params = zip(*(self.pool[block, offset] for offset in range(self.block_size)), strict=True)
            assert held == struct.unpack(f"<{self.block_size}i", key[32:])
            assert set(params) == {self.params}, "what older parameters have made can be found"

    def check_plan(self, plan: StepPlan) -> None:
        rows, config = plan.rows, self.config
        assert plan.num_tokens == sum(row.num_tokens for row in rows) <= config.max_num_batched_tokens
        assert sum(row.samples + row.num_scored for row in rows) <= config.max_num_seqs
        slots = [row.request.slot for row in rows]
        assert len(set(slots)) == len(slots) and set(slots) <= set(range(config.max_num_seqs))
        sizes = [row.num_tokens for row in rows if row.token_on_device or row.num_tokens > 1]
        assert sizes == sorted(sizes, key=lambda size: size > 1), "a decode comes after a prefill chunk"
        for row in rows:
            assert row.num_tokens >= 1
            seen = max(0, row.start - self.window + 1) // self.block_size
            assert not any(row.request.block_ids[:seen]) and 0 not in row.request.block_ids[seen:]
            scores = row.request.params.prompt_logprobs is not None
            left = max(0, row.request.num_prompt_tokens - 1 - row.start) if scores else 0
            assert row.num_scored == min(row.num_tokens, left)


class Simulation:
    """Runs a scheduler against the device, `run_ahead` (0 or 1) steps ahead of the commits."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        run_ahead: int = 1,
        num_seqs: int = 8,
        num_batched: int = 32,
        policy: str = "fcfs",
        buckets: tuple[int, ...] = (),
        caching: bool = True,
        window: int | None = None,
    ) -> None:
        config = SchedulerConfig(num_seqs, num_batched, 10_000, policy, buckets)
        cache = CacheConfig(block_size, num_blocks + 1, enable_prefix_caching=caching)
        self.scheduler = Scheduler(config, cache, window)
        self.device = Device(config, cache, window)
        self.run_ahead = run_ahead
        self.window = window
        self.pool_tokens = num_blocks * block_size
        self.pending: tuple[StepPlan, StepResult] | None = None
        self.requests: dict[str, Request] = {}
        self.expected: dict[str, tuple[list[int], str, int | None]] = {}
        self.num_steps = 0
        self.first_token_step: dict[str, int] = {}
        self.plans: list[StepPlan] = []
        self.live: list[Request] = []

    def add(
        self,
        prompt: list[int] | int,
        max_tokens: int = 5,
        *,
        priority: int = 0,
        eos=(),
        salt: str | None = None,
        n: int = 1,
        **params,
    ) -> Request:
        """Adds a request of `n` samples; the first is returned, `siblings` has all."""
        count = len(self.requests)
        prompt = [(7 * count + i) % VOCAB for i in range(prompt)] if isinstance(prompt, int) else prompt
        group = [
            Request(
                f"r{count + index}",
                prompt,
                SamplingParams(max_tokens=max_tokens, **(params if index == 0 else params | {"prompt_logprobs": None})),
                arrival_time=float(self.num_steps),
                max_total_tokens=len(prompt) + max_tokens,
                eos_token_ids=frozenset(eos),
                seed=count,
                child_index=index,
                priority=priority,
                cache_salt=salt,
            )
            for index in range(n)
        ]
        for request in group:
            self.expect(request)
        self.scheduler.add(group[0], group[1:])
        return group[0]

    def fork(self, source: Request, output: list[int] | None = None, **fields) -> Request:
        request = source.twin(f"r{len(self.requests)}", output_token_ids=output, **fields)
        self.expect(request)
        return self.scheduler.fork(source, request)

    def expect(self, request: Request) -> None:
        pool_tokens = self.pool_tokens if self.window is None else self.scheduler.capacity.bound(10**6) - 1
        self.expected[request.request_id] = generate_alone(request, pool_tokens, self.window)
        self.live.append(request)
        self.requests[request.request_id] = request

    def step(self) -> StepPlan | None:
        if self.pending and (self.scheduler.must_sync or not self.run_ahead):
            self.commit()
        plan = self.scheduler.schedule()
        self.num_steps += 1
        self.check()
        result = self.device.execute(plan) if plan else None
        self.device.check_cache(self.scheduler.block_manager.cache.keys)
        if self.pending:
            self.commit()
        elif plan is None:
            assert not self.scheduler.has_unfinished, "requests are left, nothing is in flight, nothing is scheduled"
        if plan:
            self.plans.append(plan)
            self.pending = (plan, result)
            if not self.run_ahead:
                self.commit()
        return plan

    def commit(self) -> None:
        plan, result = self.pending
        self.pending = None
        for request, row in self.scheduler.commit(plan, result):
            if not row.finite:
                self.scheduler.finish(request, "error", error="the logits are not finite")
            elif row.token_id is not None:
                self.first_token_step.setdefault(request.request_id, self.num_steps)
                if stop := check_stop(request):
                    self.scheduler.finish(request, stop.reason, stop.stop_reason)
        self.check()

    def run(self, limit: int = 10_000) -> None:
        """Steps until nothing is left."""
        for _ in range(limit):
            if self.step() is None and not self.scheduler.has_unfinished and self.pending is None:
                return
        raise AssertionError(f"not done after {limit} steps")

    def check(self) -> None:
        self.scheduler.check_integrity()
        for request in list(self.live):
            if request.is_finished:
                assert request.slot == -1 and not request.block_ids
                self.live.remove(request)
                continue
            assert 0 <= request.num_inflight <= 2
            assert request.num_computed_tokens <= request.num_tokens
            assert (request.slot >= 0) == bool(request.block_ids)
            empty = len(request.block_ids) * self.device.block_size - request.num_computed_tokens
            assert 0 <= empty < self.device.block_size, "more blocks than the tokens need"

    def check_outputs(self) -> None:
        """Every request ended as it would have alone; aborted ones got a beginning of that."""
        for name, request in self.requests.items():
            output, reason, stop_reason = self.expected[name]
            assert request.is_finished
            if request.finish_reason in ("abort", "error"):
                assert request.output_token_ids == output[: len(request.output_token_ids)]
            else:
                assert request.output_token_ids == output
                assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)
        stats = self.scheduler.stats
        assert stats.num_free_blocks == stats.num_blocks
        assert (stats.num_running, stats.num_waiting) == (0, 0)


@pytest.fixture(scope="session")
def simulation() -> Callable[..., Simulation]:
    return Simulation
