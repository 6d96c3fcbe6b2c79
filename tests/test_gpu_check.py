"""scripts/gpu_check.py: a rehearsal, what becomes of workers that die, and checks that notice wrong numbers."""

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]

# Does what the arguments' --match says on its first start, and ends well on the next.
FAKE_WORKER = """
import os, sys, time
from pathlib import Path
from scripts.gpu_checks.journal import Journal

out = Path(sys.argv[sys.argv.index("--out") + 1])
kind = sys.argv[sys.argv.index("--match") + 1]
threads = sys.argv[sys.argv.index("--threads") + 1]
journal = Journal(out / "results.jsonl")
print("threads", threads, flush=True)
if journal.records and kind != "always":
    journal.add("correctness", "second", "ok", of_tolerance=0.5)
    sys.exit(0)
journal.add("correctness", "first", "begin", kernel="paged_attention int8")
if kind == "dies" or kind == "always":
    os.kill(os.getpid(), 11)
if kind == "hangs":
    time.sleep(60)
if kind == "poisoned":
    journal.add("correctness", "first", "failed", kernel="paged_attention int8", why="CUDA_ERROR", poisoned=True)
    sys.exit(75)
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check_under_test", ROOT / "scripts" / "gpu_check.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def with_fake_worker(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, list[dict[str, Any]]]]:
    """Runs the script with a worker that does as it is told; gives the exit status and the records."""
    (tmp_path / "fake_worker.py").write_text(FAKE_WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(script, "WORKER", "fake_worker")

    def run(kind: str, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
        status = script.main(["--match", kind, "--out", str(tmp_path / "out"), "--threads", "7", *arguments])
        return status, records(tmp_path / "out")

    return run


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def ends(of: list[dict[str, Any]]) -> dict[str, str]:
    return {record["case"]: record["status"] for record in of}


@pytest.mark.parametrize("kind", ["dies", "hangs", "poisoned"])
def test_a_new_worker_goes_on_behind_the_case_that_broke(
    with_fake_worker: Callable[..., tuple[int, list[dict[str, Any]]]], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = with_fake_worker(kind, "--stall", "2")
    assert status == 1
    assert ends(found) == {"first": "failed" if kind == "poisoned" else "crashed", "second": "ok"}
    assert all(record["kernel"] == "paged_attention int8" for record in found if record["case"] == "first")
    printed = capsys.readouterr().out
    assert printed.index("threads 7") < printed.index("threads 1")  # then no other program's compilation is to blame
    assert "1 of 2 cases agree" in printed and "first" in printed


def test_workers_that_keep_dying_end_the_run(
    with_fake_worker: Callable[..., tuple[int, list[dict[str, Any]]]], script: ModuleType
) -> None:
    status, found = with_fake_worker("always")
    assert status == 1
    assert len([r for r in found if r["status"] == "crashed"]) == script.MAX_DEATHS + 1


def test_an_earlier_run_is_kept(
    with_fake_worker: Callable[..., tuple[int, list[dict[str, Any]]]], tmp_path: Path
) -> None:
    for _ in range(2):
        with_fake_worker("poisoned")
    assert len(list((tmp_path / "out").glob("results*.jsonl"))) == 2


def rehearse(script: ModuleType, out: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    assert script.main(["--rehearse", "--out", str(out), "--stall", "300", "--threads", "2", *arguments]) == 0
    return {record["case"]: record for record in records(out)}


def test_a_small_rehearsal(script: ModuleType, tmp_path: Path) -> None:
    arguments = ("--only", "bandwidth", "--only", "paged_decode", "--match", "e")
    found = rehearse(script, tmp_path, *arguments)
    assert found["XLA read"]["status"] == "ok"
    uneven = found["3 x 40 uneven G8 int8"]
    assert uneven["status"] == "ok" and uneven["error"] < 0.008
    assert "3 x 40 G4 bf16" not in found
    assert not {"us", "gb_per_s", "share"} & set().union(*found.values())  # a rehearsal claims no times
    assert "| 3 x 40 uneven G8 int8 |" in (tmp_path / "summary.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_rehearsal(script: ModuleType, tmp_path: Path) -> None:
    found = rehearse(script, tmp_path, "--budget", "1500")
    assert {record["stage"] for record in found.values()} == {
        "card",
        "correctness",
        "bandwidth",
        "paged_decode",
        "prefill",
        "peers",
        "products",
        "decode_step",
    }
    unsettled = {case for case, record in found.items() if record["status"] not in ("ok", "skipped")}
    assert unsettled == set()
    skipped = {case for case, record in found.items() if record["status"] == "skipped"}
    assert skipped <= {"nvidia-smi", "torch", "torch copy", "torch SDPA 2 x 48"}


def test_without_a_gpu_there_is_nothing_to_check(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert script.main(["--out", str(tmp_path)]) == 2
    printed = capsys.readouterr().out
    assert "no GPU here" in printed
    assert "failures" not in printed


def test_a_match_without_cases_is_no_success(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--rehearse", "--only", "card", "--match", "no such case", "--out", str(tmp_path)]
    assert script.main(arguments) == 2
    assert "--match no such case: no case of card has this in its name" in capsys.readouterr().out


def test_an_unknown_gpu_is_refused_at_once(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.main(["--compile-for", "h300", "--out", str(tmp_path)])
    assert "invalid choice: 'h300' (choose from" in capsys.readouterr().err


class FakeSession:
    """What `run_case` asks of a session; 100 bytes of memory, no program to compile."""

    def __init__(self, path: Path) -> None:
        from scripts.gpu_checks.journal import Journal

        self.journal = Journal(path)
        self.memory_bytes = 100
        self.options = SimpleNamespace(compile_for=None)
        self.seconds = 10.0

    def seconds_left(self, share: float = 1.0) -> float:
        return self.seconds * share

    def wrong_kernels(self) -> set[str]:
        return {"broken"}


def run_case(tmp_path: Path, act: Callable[[], dict[str, Any]], seconds: float = 10.0, **fields: Any) -> dict[str, Any]:
    from scripts.gpu_checks.case import Case
    from scripts.gpu_checks.worker import run_case

    session = FakeSession(tmp_path / "journal")
    session.seconds = seconds
    return run_case(session, Case("prefill", "a case", lambda *_: act(), **fields), 1.0)


def raising(error: Exception) -> Callable[[], dict[str, Any]]:
    def act() -> dict[str, Any]:
        raise error

    return act


def test_a_case_ends_as_it_went(tmp_path: Path) -> None:
    from scripts.gpu_checks.case import CheckFailed, NotHere

    assert run_case(tmp_path, lambda: {"us": 3.0})["us"] == 3.0
    assert run_case(tmp_path, dict, seconds=-1.0)["status"] == "dropped"
    assert run_case(tmp_path, dict, num_bytes=101)["status"] == "dropped"
    assert run_case(tmp_path, dict, kernel="broken")["status"] == "skipped"
    assert run_case(tmp_path, raising(NotHere("no torch")))["why"] == "no torch"
    assert run_case(tmp_path, raising(NotImplementedError("e4m3")))["status"] == "skipped"
    assert run_case(tmp_path, raising(CheckFailed("off", error=0.5)))["error"] == 0.5
    failed = run_case(tmp_path, raising(RuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access")))
    assert failed["status"] == "failed" and failed["poisoned"]
    assert "poisoned" not in run_case(tmp_path, raising(ValueError("a bad shape")))


def test_the_journal_survives_a_line_that_was_cut_off(tmp_path: Path) -> None:
    from scripts.gpu_checks.journal import Journal

    path = tmp_path / "journal"
    journal = Journal(path)
    journal.add("card", "jax", "begin")
    journal.add("card", "jax", "ok")
    journal.add("prefill", "a", "begin")
    with path.open("a") as file:
        file.write('{"stage": "prefill", "case"')
    read = Journal(path)
    assert read.is_settled("card", "jax") and not read.is_settled("prefill", "a")
    assert [record["case"] for record in read.unfinished()] == ["a"]


def test_the_summary_says_what_is_missing(tmp_path: Path) -> None:
    from scripts.gpu_checks.journal import Journal
    from scripts.gpu_checks.report import as_markdown

    journal = Journal(tmp_path / "journal")
    times = {"us": 10.0, "us_least": 9.0, "us_most": 12.0}
    journal.add("paged_decode", "64 x 8k", "ok", **times, gb_per_s=3700.0, share=0.86)
    journal.add("paged_decode", "1 x 1k", "dropped", why="no time")
    journal.add("paged_decode", "1 x 8k", "begin")
    journal.add("correctness", "kv_write", "failed", kernel="kv_write", why="error over tolerance: key 3")
    text = as_markdown(journal)
    assert "| 64 x 8k | 10.0 (9.0 to 12.0) | 3700 | 86.0% |" in text
    assert "**Dropped**: 1 x 1k (no time)." in text and "**Cut off**: 1 x 8k" in text
    assert "0 of 1 cases agree" in text and "**FAILED**: kv_write (error over tolerance: key 3)." in text


def test_the_summary_compares_products_with_bfloat16(tmp_path: Path) -> None:
    from scripts.gpu_checks.journal import Journal
    from scripts.gpu_checks.report import as_markdown

    journal = Journal(tmp_path / "journal")
    for case, us, facts in (
        ("bf16 M16", 30.0, {}),
        ("W4A16 g128 offset M16", 10.0, {"goal": 3.0}),
        ("XLA T16", 5.0, {}),
    ):
        journal.add("products", case, "ok", us=us, us_least=us, us_most=us, tokens=16, **facts)
    journal.add("products", "W8A8 M1", "failed", why="off", tokens=1)
    text = as_markdown(journal)
    assert "| W4A16 g128 offset M16 | 10.0 (10.0 to 10.0) | 3.00 (goal 3) |" in text
    assert "| XLA T16 | 5.0 (5.0 to 5.0) | - |" in text and "**FAILED**: W8A8 M1 (off)." in text


def spoiled(results: Any, leaf: int) -> Any:
    """The results with one element of one array changed: a larger one than most, doubled, or the last bit of a code."""
    leaves, tree = jax.tree.flatten(results)
    array = leaves[leaf].copy()
    sizes = np.where(np.isfinite(array.astype(np.float32)), np.abs(array.astype(np.float32)), 0)
    place = np.unravel_index(np.argsort(sizes, axis=None)[array.size * 3 // 4], array.shape)
    array[place] = array[place] ^ 1 if array.dtype.kind in "iu" else 2 * array[place]
    return jax.tree.unflatten(tree, [*leaves[:leaf], array, *leaves[leaf + 1 :]])


@pytest.mark.parametrize(
    ("module", "index"),
    [
        ("attention_checks", 1),
        ("writing_checks", 0),
        ("writing_checks", 4),
        ("product_checks", 0),
        ("quantized_checks", 2),
        ("flash_checks", 0),
        ("flash_checks", 2),
    ],
)
def test_every_check_notices_one_wrong_number(module: str, index: int) -> None:
    checks = importlib.import_module(f"scripts.gpu_checks.{module}").checks("reference", True)
    check = checks[index]
    args = [None if arg is None else jnp.asarray(arg) for arg in check.args]
    results = jax.tree.map(np.asarray, jax.jit(check.function)(*args))
    assert max(check.judge(results).values()) <= 1.0
    for leaf in range(len(jax.tree.leaves(results))):
        ratios = check.judge(spoiled(results, leaf)).values()
        assert any(not ratio <= 1.0 for ratio in ratios), f"result {leaf}"


def test_the_gradients_of_the_reference_are_differences() -> None:
    from scripts.gpu_checks.references import Masking, causal, flash_attention

    rng = np.random.default_rng(0)
    q, g = rng.standard_normal((2, 1, 5, 4, 8))
    k, v = rng.standard_normal((2, 1, 7, 2, 8))
    visible, masking = causal(5, 7, 3)[None], Masking(0.4, softcap=1.5)
    result = flash_attention(q, k, v, g, visible, masking)
    for name, array in (("dq", q), ("dk", k), ("dv", v)):
        place = tuple(rng.integers(size) for size in array.shape)
        losses = []
        for step in (1e-6, -1e-6):
            array[place] += step
            losses.append(np.sum(flash_attention(q, k, v, g, visible, masking).out * g))
            array[place] -= step
        slope = (losses[0] - losses[1]) / 2e-6
        assert getattr(result, name)[place] == pytest.approx(slope, rel=1e-6, abs=1e-8), name


def test_the_work_of_a_decode_is_counted_by_hand() -> None:
    from scripts.gpu_checks.paged_decode import Decode

    plain, codes = Decode(64, 8192), Decode(64, 8192, kv="int4")
    assert plain.call_bytes == 64 * 8192 * 2 * 8 * 128 * 2 + 2 * 64 * 32 * 128 * 2
    assert codes.position_bytes == 2 * 8 * (64 + 4)
    assert Decode(1, 1024).table_sets * Decode(1, 1024).call_bytes >= 256 << 20  # more than any L2
    assert Decode(64, 8192, spread=True).contexts.mean() == pytest.approx(8192, rel=0.01)


def test_a_pytorch_that_is_missing_or_dies_is_not_here(tmp_path: Path) -> None:
    from scripts.gpu_checks.case import NotHere
    from scripts.gpu_checks.torch_peer import TorchPeer

    dies = tmp_path / "python"
    dies.write_text("#!/bin/sh\nexit 1\n")
    dies.chmod(0o755)
    peer = TorchPeer("cpu", str(dies))
    peer.start()
    time.sleep(0.2)  # so that the request finds nobody
    with pytest.raises(NotHere, match="died"):
        peer.ask("facts")
    peer.close()
    peer = TorchPeer("cpu")
    if importlib.util.find_spec("torch") is None:
        with pytest.raises(NotHere, match="not installed"):
            peer.ask("facts")
    peer.close()


def test_a_timing_is_of_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts.gpu_checks import timing

    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def step(state: int) -> int:
        clock[0] += 0.5 if state == 0 else 0.008  # the first call also loads the program
        return state + 1

    result = timing.time_chain(step, 0, operations=4, samples=5, sample_seconds=0.08)
    assert (result.samples, result.calls) == (5, 10)
    assert result.seconds == pytest.approx(0.002) and result.most == pytest.approx(0.002)
    assert result.values(True)["us"] == pytest.approx(2000) and "us" not in result.values(False)
    slow = timing.time_chain(lambda state: step(state), 1, operations=1, samples=5, sample_seconds=0.0005)
    assert (slow.samples, slow.calls) == (3, 1)
