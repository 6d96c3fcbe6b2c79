"""scripts/bench_offline.py with engines that compute nothing: what it measures, compares, prints and refuses."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "bench_offline.py"

# Answers with ids that follow from the prompt, in a time that follows from the variant: 0.5 s for the prompts and then
# `seconds a token` for each later step. It logs what it is asked, so that a test can see the order of all engines.
FAKE_WORKER = """
import json, os, sys, time
from scripts.bench_peers import worker


class FakeEngine:
    def __init__(self, request):
        if request.variant == "broken":
            raise ValueError("no such model")
        self.request = request

    def facts(self):
        return {"fake": "1.0", "threads": str(self.request.threads)}

    def generate(self, prompts, max_tokens):
        with open(os.environ["FAKE_ORDER"], "a") as order:
            order.write(json.dumps([self.request.model, self.request.max_model_len, prompts, max_tokens]) + "\\n")
        if self.request.variant == "dies" and len(prompts) == 8:
            os._exit(3)
        if self.request.variant == "torn" and max_tokens == 5:
            worker._reply = reply_in_part
        if self.request.variant == "hangs" and len(prompts) == 8:
            time.sleep(60)
        print("a banner on stdout")
        if self.request.variant == "lazy":
            max_tokens -= 1
        wrong = self.request.variant == "wrong"
        return [[prompt[0] + i + (wrong and prompt[1] % 2) for i in range(max_tokens)] for prompt in prompts]


def timed(engine, prompts, max_tokens):
    real = original(engine, prompts, max_tokens)
    step = {"fast": 0.125, "slow": 0.25, "instant": 0.0}.get(engine.request.variant, 1.0)
    return real | {"seconds": 0.5 + step * (max_tokens - 1)}


def reply_in_part(replies, reply):
    replies.write("{")
    replies.flush()
    os._exit(4)


original, worker._timed_generate = worker._timed_generate, timed
worker.serve(FakeEngine)
"""
VARIANTS = ("fast", "slow", "instant", "wrong", "lazy", "broken", "dies", "torn", "hangs")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script as a module, with a fake engine of every variant among its kinds."""
    spec = importlib.util.spec_from_file_location("bench_offline_under_test", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    (tmp_path / "fake_worker.py").write_text(FAKE_WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_ORDER", str(tmp_path / "order"))
    monkeypatch.setattr(module, "KINDS", module.KINDS | {name: ("fake_worker", name) for name in VARIANTS})
    return module


@pytest.fixture
def run(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run with the named fake engines and extra arguments; gives the exit status and what was printed."""

    def run_it(engines: list[str], *arguments: str) -> tuple[int, str]:
        peers = [text for name in engines for text in ("--peer", f"{name}={sys.executable}:model-of-{name}")]
        status = bench.main(["--peers-only", *peers, *arguments])
        return status, capsys.readouterr().out

    return run_it


def calls(tmp_path: Path) -> list[tuple[str, int, list[list[int]], int]]:
    return [tuple(json.loads(line)) for line in (tmp_path / "order").read_text().splitlines()]


def test_speeds_and_ratios_are_those_of_the_times(run: Callable[..., tuple[int, str]]) -> None:
    status, text = run(["fast", "slow"], "--json", "--rounds", "2", "--output-len", "5", "--input-len", "4")
    result = json.loads(text)
    assert status == 0

    speeds = {name: w["median_tokens_per_second"] for name, w in result["workloads"].items()}
    assert speeds["decode1"] == {"fast": 8.0, "slow": 4.0}  # 1 / seconds a step: the prompt's time is taken off
    assert speeds["batch8"] == {"fast": 8 * 5 / 1.0, "slow": 8 * 5 / 1.5}  # the whole run
    assert speeds["batch32"] == {"fast": 32 * 5 / 1.0, "slow": 32 * 5 / 1.5}
    assert speeds["prefill512"] == {"fast": 1024.0, "slow": 1024.0}  # prompt tokens

    assert result["workloads"]["decode1"]["median_ratio"] == {"slow": 2.0}
    assert result["workloads"]["batch32"]["median_ratio"] == {"slow": 1.5}
    assert result["workloads"]["batch32"]["equal_outputs"] == {"slow": [64, 64]}
    assert len(result["runs"]) == 2 * 4 * 2
    assert result["engines"]["slow"]["fake"] == "1.0"


def test_engines_take_turns_on_the_same_fresh_prompts(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    arguments = ("--workload", "batch8", "--rounds", "3", "--input-len", "4", "--output-len", "12")
    run(["fast", "slow", "slow@again"], *arguments)
    warm_up, measured = calls(tmp_path)[:3], calls(tmp_path)[3:]

    assert [model for model, *_ in measured] == ["model-of-fast", "model-of-slow", "model-of-slow@again"] * 3
    assert {max_tokens for *_, max_tokens in warm_up} == {8}
    assert {max_tokens for *_, max_tokens in measured} == {12}
    for turn in range(3):
        assert measured[3 * turn][2] == measured[3 * turn + 1][2] == measured[3 * turn + 2][2]
    prompts = [tuple(prompt) for _, _, batch, _ in warm_up[:1] + measured[::3] for prompt in batch]
    assert len(set(prompts)) == len(prompts) == 8 * 4  # no prompt comes twice, so nothing can be served from a cache
    assert {len(prompt) for prompt in prompts} == {4}
    assert all(32 <= token_id < 32000 for prompt in prompts for token_id in prompt)


def test_the_seed_decides_the_prompts(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    for seed in ("1", "1", "2"):
        run(["fast"], "--workload", "batch8", "--rounds", "1", "--input-len", "3", "--output-len", "2", "--seed", seed)
    first, second, other = calls(tmp_path)[1::2]
    assert first == second != other


def test_an_engine_gets_room_for_the_longest_workload(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    run(["fast"], "--rounds", "1", "--input-len", "3", "--output-len", "4")
    assert {max_model_len for _, max_model_len, *_ in calls(tmp_path)} == {576}  # 512 + 1, up to a multiple of 64


def test_different_ids_are_counted(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    _, text = run(["fast", "wrong"], "--json", "--workload", "batch32", "--rounds", "1", "--input-len", "2")
    same = sum(prompt[1] % 2 == 0 for prompt in calls(tmp_path)[-1][2])
    assert 0 < same < 32
    assert json.loads(text)["workloads"]["batch32"]["equal_outputs"] == {"wrong": [same, 32]}


def test_markdown_has_medians_ranges_ratios_and_facts(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    target = tmp_path / "report.md"
    arguments = ("--workload", "decode1", "--rounds", "3", "--output-len", "4", "--output", str(target))
    _, text = run(["fast", "slow"], *arguments)
    assert target.read_text().strip() == text.strip()
    assert "| 8.0 (8.0 to 8.0) | 4.0 (4.0 to 4.0) |" in text
    assert "| decode1 | 2.00 (2.00 to 2.00) |" in text
    assert "| decode1 | 3 of 3 |" in text
    assert "* CPU: " in text and "* cores: " in text and "fake 1.0" in text


def test_median_and_range_over_rounds(bench: ModuleType) -> None:
    report, workload = bench.Comparison, bench.workload_named("batch8", 2, 3)
    comparison = report({}, ["ours", "theirs"], [workload], 3)
    for round_number, (ours, theirs) in enumerate([(10.0, 5.0), (30.0, 10.0), (20.0, 20.0)]):
        for engine, speed in (("ours", ours), ("theirs", theirs)):
            comparison.add(bench.Measurement(engine, "batch8", round_number, speed, 1.0, None, 0.25, [[1]]))
    text = bench.as_markdown(comparison)
    assert "| 20.0 (10.0 to 30.0) | 10.0 (5.0 to 20.0) |" in text
    assert "| batch8 | 2.00 (1.00 to 3.00) |" in text  # of the ratios by round: 2, 3 and 1
    assert "median 25%, worst 25%" in text and "Not a quiet machine" in text


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("broken", "ValueError: no such model"),
        ("lazy", "got 8 of lengths [4]"),
        ("dies", "exit status 3"),
        ("torn", "exit status 4"),
    ],
)
def test_a_failing_engine_is_named_and_the_others_are_measured(
    run: Callable[..., tuple[int, str]], engine: str, message: str
) -> None:
    arguments = ("--workload", "batch8", "--rounds", "1", "--output-len", "5")
    status, text = run(["fast", engine], "--json", *arguments)
    result = json.loads(text)
    assert status == 1
    assert list(result["failures"]) == [engine]
    assert message in result["failures"][engine]
    assert result["workloads"]["batch8"]["median_tokens_per_second"] == {"fast": 40.0, engine: None}


def test_an_engine_that_does_not_answer_is_killed(bench: ModuleType, tmp_path: Path) -> None:
    spec = bench.parse_peer(f"hangs={sys.executable}", "model")
    session = bench.EngineSession(spec, tmp_path, bench.worker_environment(), 60.0)
    session.load(threads=1, max_model_len=64, max_num_seqs=8)
    session.timeout = 0.2
    with pytest.raises(bench.EngineError, match=r"hangs: its process ended during 'generate' \(limit 0.2 s"):
        session.generate([[1, 2]] * 8, 4)
    session.close()


def test_a_run_too_short_to_time_decoding_is_told_and_the_engine_goes_on(run: Callable[..., tuple[int, str]]) -> None:
    arguments = ("--workload", "decode1", "--workload", "batch8", "--rounds", "1", "--output-len", "5")
    status, text = run(["fast", "instant"], "--json", *arguments)
    result = json.loads(text)
    assert status == 0
    assert len(result["untimed"]) == 1
    assert result["untimed"][0].startswith("instant: decode1: 5 tokens took 0.500 s")
    assert result["workloads"]["decode1"]["median_tokens_per_second"] == {"fast": 8.0, "instant": None}
    assert result["workloads"]["batch8"]["median_tokens_per_second"] == {"fast": 40.0, "instant": 80.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer", "vllm"], "write KIND[@LABEL]=PYTHON[:MODEL]"),
        (["--peer", "vllm="], "write KIND[@LABEL]=PYTHON[:MODEL]"),
        (["--peer", "sglang=python"], "KIND 'sglang' is unknown"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--output-len", "1"], "--output-len is 1"),
        (["--peers-only"], "name a peer"),
        (["--workload", "batch64"], "batch64"),
        (["--peer", "vllm=a", "--peer", "vllm=b"], "two engines are called 'vllm'"),
    ],
)
def test_bad_arguments_are_refused(
    bench: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        bench.main(arguments)
    assert message in capsys.readouterr().err + str(refusal.value)


def test_engines_default_to_jaxinfer_first_and_peers_to_its_model(bench: ModuleType) -> None:
    args = bench.parse_args(
        ["--model", "some-model", "--peer", "vllm=/v/python", "--peer", "llama.cpp@q8=/l/python:/q8"]
    )
    specs: list[Any] = bench.engine_specs(args)
    assert [spec.label for spec in specs] == ["jaxinfer", "vllm", "llama.cpp@q8"]
    assert [spec.model for spec in specs] == ["some-model", "some-model", "/q8"]
    assert [spec.python for spec in specs] == [sys.executable, "/v/python", "/l/python"]
    assert [spec.variant for spec in specs] == ["", "eager", ""]
