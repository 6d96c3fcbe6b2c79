"""PyTorch in a process of its own, so that its libraries and its memory stay apart from JAX's; spoken to in JSON lines.

As a module to run, it is that process: `python -m scripts.gpu_checks.torch_peer DEVICE` answers each line
``{"op": ..., ...}`` with a line ``{"us": ..., ...}`` or ``{"error": ...}``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from scripts.gpu_checks.case import NotHere

HEARTBEAT_SECONDS = 10.0
PATIENCE_SECONDS = 90.0
"""The first answer waits for PyTorch to be imported."""


class TorchPeer:
    """The process, started at once so that its slow import is over when it is first asked. Idle between calls."""

    def __init__(self, device: str, python: str = sys.executable) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._command = [python, "-m", "scripts.gpu_checks.torch_peer", device]

    def start(self) -> None:
        """Starts the process if it is not running."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one request.

        Raises:
            NotHere: PyTorch is missing, or cannot do it.
        """
        self.start()
        assert self._process and self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"op": op} | arguments) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise NotHere("PyTorch's process died") from None
        answer: dict[str, Any] = json.loads(self._answer())
        if "error" in answer:
            raise NotHere(answer["error"])
        return answer

    def _answer(self) -> str:
        """One line; says now and then that it waits, since silence is a sign of a hung GPU."""
        assert self._process and self._process.stdout
        for _ in range(int(PATIENCE_SECONDS / HEARTBEAT_SECONDS)):
            if select.select([self._process.stdout], [], [], HEARTBEAT_SECONDS)[0]:
                line = self._process.stdout.readline()
                if not line:
                    raise NotHere("PyTorch's process died")
                return line
            print("  ... waiting for PyTorch", flush=True)
        self._process.kill()
        raise NotHere(f"PyTorch gave no answer in {PATIENCE_SECONDS:.0f} s")

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            assert self._process.stdin and self._process.stdout
            with contextlib.suppress(BrokenPipeError):  # it died with a request unread
                self._process.stdin.close()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
            self._process = None


def _timed(torch: Any, device: str, call: Callable[[], Any], seconds: float, samples: int) -> dict[str, Any]:
    """Median, least and most microseconds of `call`, by events on the GPU's stream."""
    if device == "cpu":  # a rehearsal
        call()
        return {"samples": 1, "calls_per_sample": 1}
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    calls = max(2, min(1000, round(seconds / ((time.perf_counter() - begin) / 3))))
    times = []
    for _ in range(samples):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(calls):
            call()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) * 1e3 / calls)
    return {
        "us": median(times),
        "us_least": min(times),
        "us_most": max(times),
        "samples": samples,
        "calls_per_sample": calls,
    }


def _copy(torch: Any, device: str, num_bytes: int, seconds: float, samples: int) -> dict[str, Any]:
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _timed(torch, device, lambda: target.copy_(source), seconds, samples)


def _sdpa(
    torch: Any,
    device: str,
    batch: int,
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    seconds: float,
    samples: int,
) -> dict[str, Any]:
    """Causal scaled_dot_product_attention in bfloat16, by each backend that takes it; the fastest counts."""
    q = torch.randn(batch, heads, length, head_dim, dtype=torch.bfloat16, device=device)
    k, v = (torch.randn(batch, kv_heads, length, head_dim, dtype=torch.bfloat16, device=device) for _ in range(2))
    attention = torch.nn.functional.scaled_dot_product_attention
    results: dict[str, dict[str, Any]] = {}
    errors = []
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        backend = getattr(torch.nn.attention.SDPBackend, name)
        try:
            with torch.nn.attention.sdpa_kernel([backend]):

                def call() -> Any:
                    return attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

                results[name] = _timed(torch, device, call, seconds, samples)
        except RuntimeError as error:
            errors.append(f"{name}: {str(error).splitlines()[0]}")
    if not results:
        raise RuntimeError("; ".join(errors))
    best = min(results, key=lambda name: results[name].get("us", 0.0))
    times = {name: result["us"] for name, result in results.items() if "us" in result}
    return results[best] | {"backend": best, "all_us": times}


def _facts(torch: Any, device: str) -> dict[str, Any]:
    facts = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    if device == "cpu":
        return facts
    properties = torch.cuda.get_device_properties(0)
    return facts | {
        "num_sms": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", 0),
        "cudnn": torch.backends.cudnn.version(),
    }


def serve(device: str) -> None:
    """Answers standard input until it ends."""
    problem = ""
    torch: Any = None
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        problem = f"PyTorch is not installed ({error})"
    operations: dict[str, Callable[..., dict[str, Any]]] = {"facts": _facts, "copy": _copy, "sdpa": _sdpa}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"error": problem} if problem else operations[request.pop("op")](torch, device, **request)
        except Exception as error:  # the other requests may still work
            answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        if torch is not None and device != "cpu":
            torch.cuda.empty_cache()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
