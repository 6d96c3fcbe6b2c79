"""A worker process: runs the stages' cases until time is up. `gpu_check.py` starts it, and a new one when it dies."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

from scripts.gpu_checks.case import Case, CheckFailed, NotHere
from scripts.gpu_checks.journal import BEGIN, DROPPED, Journal
from scripts.gpu_checks.options import parse_options
from scripts.gpu_checks.report import case_line, write_summary

SHARES = {
    "card": 0.2,
    "correctness": 0.4,
    "bandwidth": 0.55,
    "paged_decode": 0.7,
    "prefill": 0.77,
    "peers": 0.82,
    "products": 0.86,
    "decode_step": 1.0,
}
"""Of the budget, when a stage ends in the first round; what it dropped gets what is left in the second."""

COMPILE_AHEAD_SHARE = 0.5
"""Of the budget, until when a timed stage waits for programs of later stages, which would disturb it."""

UNTIMED = ("card", "correctness")
POISONED = ("CUDA_ERROR", "illegal memory access", "unspecified launch failure", "misaligned address")
"""In the messages of errors after which no program runs in this process any more."""

EXIT_POISONED = 75


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the journal says is left; returns `EXIT_POISONED` where a new process must go on, else 0."""
    options = parse_options(argv, "worker of gpu_check.py")
    # JAX leaves a quarter of the memory to PyTorch.
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # its old name; JAX takes one of them
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.75")
    if options.rehearse or options.compile_for:
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from scripts.gpu_checks.programs import Programs
    from scripts.gpu_checks.session import Session
    from scripts.gpu_checks.torch_peer import TorchPeer

    journal = Journal(options.out / "results.jsonl")
    programs = Programs(options.threads, options.compile_for, rehearse=options.rehearse)
    torch = TorchPeer("cuda" if jax.default_backend() == "gpu" else "cpu")
    session = Session(options, journal, programs, torch)
    if not (options.rehearse or options.compile_for or session.on_gpu):
        print(
            f"JAX has no GPU here (its devices: {jax.devices()}); --rehearse and --compile-for work without", flush=True
        )
        return 2
    if options.compile_for is None:
        torch.start()
    try:
        return run_stages(session)
    finally:
        programs.close()
        torch.close()


def run_stages(session: Any) -> int:
    """Two rounds over all stages: the second takes up what the first dropped for want of time."""
    stages = {name: _chosen(session, name) for name in session.options.stages}
    for cases in stages.values():
        for case in cases:
            session.programs.submit(case.programs)
    for shares in (SHARES, dict.fromkeys(SHARES, 1.0)):
        for stage, cases in stages.items():
            if not run_stage(session, stage, cases, shares[stage]):
                return EXIT_POISONED
    return 0


def _chosen(session: Any, stage: str) -> list[Case]:
    try:
        cases: list[Case] = importlib.import_module(f"scripts.gpu_checks.{stage}").cases(session)
    except Exception as error:  # the other stages can still tell something
        session.journal.add(stage, "cases", "failed", why=_first_line(error))
        print(f"[{stage}] {_first_line(error)}", flush=True)
        return []
    wanted = [case for case in cases if session.options.match in case.name]
    return [case for case in wanted if not session.journal.is_settled(stage, case.name)]


def run_stage(session: Any, stage: str, cases: list[Case], share: float) -> bool:
    """Runs the cases that are not settled until `share` of the budget is used; False: this process is of no use now."""
    left = [case for case in cases if not session.journal.is_settled(stage, case.name)]
    if not left:
        return True
    if stage not in UNTIMED and session.options.compile_for is None:
        busy = session.programs.wait_until_idle(session.seconds_left(COMPILE_AHEAD_SHARE))
        if busy:
            session.journal.add(stage, "compiling", "note", why=f"{busy} programs were compiling while this was timed")
    print(f"[{stage}] {len(left)} cases, {session.seconds_left():.0f} s left", flush=True)
    for case in left:
        record = run_case(session, case, share)
        print(f"[{stage}] {case_line(record)}", flush=True)
        if record.get("poisoned"):
            return False
    write_summary(session.journal, session.options.out)
    return True


def run_case(session: Any, case: Case, share: float) -> dict[str, Any]:
    """Runs one case and records how it ended."""
    common = case.facts | ({"kernel": case.kernel} if case.kernel else {})

    def end(status: str, **values: Any) -> dict[str, Any]:
        record: dict[str, Any] = session.journal.add(case.stage, case.name, status, **common, **values)
        return record

    if session.seconds_left(share) <= 0:
        return end(DROPPED, why="no time")
    if case.num_bytes > 0.95 * session.memory_bytes:
        return end(DROPPED, why=f"needs {case.num_bytes / 2**30:.0f} GiB")
    if case.stage not in UNTIMED and case.kernel in session.wrong_kernels():
        return end("skipped", why=f"{case.kernel} failed its checks")
    session.journal.add(case.stage, case.name, BEGIN, **common)
    begin = time.monotonic()
    try:
        built = [session.programs.get(program, session.seconds_left(share)) for program in case.programs]
        compiled = {"compile_s": round(sum(b.seconds for b in built), 2)}
        if session.options.compile_for is not None:
            return end("compiled", **compiled, temp_mib=max((b.temp_bytes for b in built), default=0) >> 20)
        values = case.run(session, [b.call for b in built])
        return end("ok", **values, **compiled, run_s=round(time.monotonic() - begin, 2))
    except FutureTimeout:
        return end(DROPPED, why="still compiling when its time was up")
    except (NotHere, NotImplementedError) as reason:
        return end("skipped", why=str(reason))
    except CheckFailed as failure:
        return end("failed", why=str(failure), **failure.values)
    except Exception as error:
        poisoned = {"poisoned": True} if any(sign in str(error) for sign in POISONED) else {}
        return end("failed", why=_first_line(error), **poisoned)
    finally:
        gc.collect()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
