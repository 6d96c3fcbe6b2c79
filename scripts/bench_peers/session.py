"""One engine as bench_offline.py sees it: a worker process, spoken to in the JSON lines that worker.py documents."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class EngineError(RuntimeError):
    """An engine failed, was too slow or died; the message names the engine and quotes the end of its log."""


@dataclass(frozen=True)
class EngineSpec:
    """`label` is unique in a comparison; the worker `module` runs under `python` and loads `model` as `variant`."""

    label: str
    module: str
    variant: str
    python: str
    model: str


@dataclass(frozen=True)
class Run:
    """One timed generate call."""

    seconds: float
    token_ids: list[list[int]]


class EngineSession:
    """Starts the worker at once, and kills it when an answer takes more than `timeout` seconds. Idle between calls."""

    def __init__(self, spec: EngineSpec, log_dir: Path, environment: Mapping[str, str], timeout: float) -> None:
        self.spec = spec
        self.facts: dict[str, str] = {}
        self.start_seconds = 0.0
        self.timeout = timeout
        self._log_path = log_dir / (spec.label.replace("/", "_") + ".log")
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [spec.python, "-m", spec.module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=dict(environment),
                start_new_session=True,  # an engine's own processes end with it, and Ctrl-C is for us to handle
            )

    def load(self, *, threads: int, max_model_len: int, max_num_seqs: int) -> None:
        """Load the model; raises EngineError."""
        reply = self._ask(
            {
                "op": "load",
                "model": self.spec.model,
                "threads": threads,
                "max_model_len": max_model_len,
                "max_num_seqs": max_num_seqs,
                "variant": self.spec.variant,
            }
        )
        self.facts, self.start_seconds = reply["facts"], reply["seconds"]

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Run:
        """Greedy, EOS ignored; raises EngineError."""
        return Run(**self._ask({"op": "generate", "prompts": prompts, "max_tokens": max_tokens}))

    def close(self) -> None:
        """End the worker, by force where it does not go by itself; may be called again."""
        assert self._process.stdout is not None
        if self._process.stdout.closed:
            return
        try:
            self._process.communicate(json.dumps({"op": "exit"}) + "\n", timeout=30)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.communicate()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        watchdog = threading.Timer(self.timeout, self._kill)
        watchdog.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        finally:
            watchdog.cancel()
        if not line.endswith("\n"):
            raise EngineError(
                f"{self.spec.label}: its process ended during {request['op']!r} (limit {self.timeout:g} s, exit "
                f"status {self._process.wait()}); end of {self._log_path}:\n{self._log_tail()}"
            )
        reply = json.loads(line)
        if "error" in reply:
            raise EngineError(f"{self.spec.label}: {reply['error']}; its log is {self._log_path}")
        return reply

    def _log_tail(self, num_lines: int = 8) -> str:
        return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-num_lines:])
