"""Programs compiled ahead by threads, in the order in which they will be needed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from scripts.gpu_checks.case import Compiled, Program

HEARTBEAT_SECONDS = 10.0
QUICK = {"xla_backend_optimization_level": 0}
"""For interpreted kernels: long programs that run briefly, so that optimising them would take most of the time."""


@dataclass(frozen=True)
class Built:
    """A program and how long it took to trace, lower and compile; other threads were at work too."""

    call: Compiled
    seconds: float
    temp_bytes: int


class Programs:
    """A pool of compiling threads. With `compile_for` the results cannot be called; those of a rehearsal are slow."""

    def __init__(self, threads: int, compile_for: str | None = None, *, rehearse: bool = False) -> None:
        # The deviceless compiler changes settings of the whole process, so that it works on one program at a time.
        self._pool = ThreadPoolExecutor(1 if compile_for else threads, thread_name_prefix="compile")
        self._target = compile_for
        self._options: dict[str, Any] = {"compiler_options": QUICK} if rehearse else {}
        self._futures: dict[str, Future[Built]] = {}

    def submit(self, programs: Iterable[Program]) -> None:
        """Queues what is not queued yet."""
        for program in programs:
            if program.name not in self._futures:
                self._futures[program.name] = self._pool.submit(self._build, program)

    def get(self, program: Program, seconds: float) -> Built:
        """The compiled program; waits that long for it (TimeoutError), and raises what its compilation raised."""
        self.submit([program])
        future = self._futures[program.name]
        self._wait([future], seconds)
        return future.result(timeout=0)

    def wait_until_idle(self, seconds: float) -> int:
        """Waits for everything queued, at most that long; returns how many are not done."""
        return self._wait(list(self._futures.values()), seconds)

    def _wait(self, futures: list[Future[Built]], seconds: float) -> int:
        """Says now and then that it waits: silence is a sign of a hung GPU."""
        end = time.monotonic() + max(seconds, 0.0)
        while left := wait(futures, timeout=min(max(end - time.monotonic(), 0.0), HEARTBEAT_SECONDS)).not_done:
            if time.monotonic() >= end:
                break
            print(f"  ... {len(left)} programs to compile", flush=True)
        return len(left)

    def close(self) -> None:
        """Forgets what has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _build(self, program: Program) -> Built:
        begin = time.perf_counter()
        if self._target is not None:
            from jaxinfer.planning.deviceless import compile_for, gpu_target

            report = compile_for(gpu_target(self._target), program.function, *program.args)
            return Built(_not_callable, time.perf_counter() - begin, report.temp_bytes)
        compiled: Any = program.function.lower(*program.args).compile(**self._options)
        memory = compiled.memory_analysis()
        temp_bytes = memory.temp_size_in_bytes if memory is not None else 0
        return Built(compiled, time.perf_counter() - begin, temp_bytes)


def _not_callable(*args: Any) -> Any:
    raise RuntimeError("compiled for a GPU that is not here")
