"""Batches over Ray: a local cluster, and what of it needs none."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxinfer.cli.main import main
from jaxinfer.cluster.line_server import LINE, NUMBER, RESULT, LineServer
from jaxinfer.cluster.ray_batch import RayOptions, _cause, _results, _workers
from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.startup.args import EngineArgs

SIZES = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_logprobs": 3}
SMALL = {**SIZES, "enforce_eager": True, "use_tqdm_on_load": False}


@pytest.fixture
def endless(scripted_checkpoint: Callable[..., Path]) -> Path:
    """A model that goes through the letters a to h for ever."""
    return scripted_checkpoint([*b"abcdefgh", *b"a"])


def request(custom_id: str, **body: Any) -> str:
    url = "/v1/completions"
    body = {"prompt": "a", "temperature": 0, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def columns(*lines: str) -> dict[str, Any]:
    return {NUMBER: np.arange(1, len(lines) + 1), LINE: np.array([line.encode() for line in lines], object)}


def test_a_server_answers_as_the_batch_job_does(endless: Path) -> None:
    server = LineServer(EngineArgs(endless, **SMALL), "tiny", None)
    lines = (
        request("one", max_tokens=3),
        request("two", prompt=["e", "h"], max_tokens=2),
        "?",
        request("long", prompt=["a", "z" * 200]),
        request("model", model="other"),
    )

    async def both() -> list[dict[str, Any]]:
        return list(await asyncio.gather(server(columns(*lines)), server(columns(*[request("x", max_tokens=9)] * 8))))

    first, second = asyncio.run(both())
    server._thread.stop()
    assert first[NUMBER] == [1, 2, 3, 4, 5] and second[NUMBER] == list(range(1, 9))
    results = [json.loads(result) for result in first[RESULT]]
    assert [result["custom_id"] for result in results] == ["one", "two", None, "long", "model"]
    assert results[2]["id"] == "jaxinfer-line-3"
    assert [result["response"]["status_code"] for result in results] == [200, 200, 400, 400, 400]
    texts = [[choice["text"] for choice in result["response"]["body"]["choices"]] for result in results[:2]]
    assert texts == [["bcd"], ["fg", "ab"]]
    assert "200" in results[3]["error"] and "'tiny'" in results[4]["error"]
    assert {json.loads(result)["response"]["body"]["choices"][0]["text"] for result in second[RESULT]} == {"bcdefghab"}


def test_a_dead_engine_ends_the_process_if_it_has_answered_before(
    endless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray starts it again then; an engine that dies of its first requests would die of them for ever."""

    class Ended(Exception):
        pass

    def leave(status: int) -> None:
        raise Ended(status)

    def fails(plan: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(os, "_exit", leave)
    for answered, error in ((0, EngineDeadError), (1, Ended)):
        server = LineServer(EngineArgs(endless, **SMALL), "tiny", None)
        for _ in range(answered):
            asyncio.run(server(columns(request("a", max_tokens=2))))
        monkeypatch.setattr(server._parts.engine.runner, "execute", fails)
        with pytest.raises(error):
            asyncio.run(server(columns(request("a", max_tokens=2))))
        server._thread.stop()


def test_results_that_come_twice_are_given_once() -> None:
    def batch(*numbers: int) -> dict[str, Any]:
        return {NUMBER: np.array(numbers), RESULT: np.array([json.dumps({"n": n}) for n in numbers], object)}

    class Dataset:
        def iter_batches(self, **options: Any) -> Iterator[dict[str, Any]]:
            yield from (batch(1, 2), batch(2, 3), batch(1, 2))

    exceptions = SimpleNamespace(RayError=OSError)
    ray = SimpleNamespace(exceptions=exceptions)
    assert list(_results(ray, Dataset(), 3)) == [[{"n": 1}, {"n": 2}], [{"n": 3}]]
    with pytest.raises(RuntimeError, match="3 of 4 results"):
        list(_results(ray, Dataset(), 4))


@pytest.mark.parametrize(
    ("resources", "options", "devices", "expected"),
    [
        ({"CPU": 16.0, "GPU": 8.0}, RayOptions(), 1, (8, 1)),
        ({"CPU": 16.0, "GPU": 8.0}, RayOptions(gpus_per_worker=4), 1, (2, 4)),
        ({"CPU": 16.0, "GPU": 8.0}, RayOptions(num_workers=3, gpus_per_worker=2), 1, (3, 2)),
        ({"CPU": 16.0, "GPU": 8.0}, RayOptions(gpus_per_worker=0), 1, (2, 0)),
        ({"CPU": 16.0, "GPU": 8.0}, RayOptions(), 4, (2, 4)),
        ({"CPU": 16.0, "GPU": 8.0}, RayOptions(), (2, 4), (1, 8)),
        ({"CPU": 16.0}, RayOptions(), 4, (2, 0)),
        ({"CPU": 16.0}, RayOptions(), 1, (2, 0)),
        ({"CPU": 16.0}, RayOptions(num_workers=5), 1, (5, 0)),
        ({"CPU": 4.0}, RayOptions(num_workers=5), 1, None),
        ({"CPU": 4.0}, RayOptions(gpus_per_worker=1), 1, None),
        ({"CPU": 16.0, "GPU": 8.0}, RayOptions(num_workers=3, gpus_per_worker=4), 1, None),
    ],
)
def test_how_many_engines(
    resources: dict[str, float],
    options: RayOptions,
    devices: int | tuple[int, int],
    expected: tuple[int, int] | None,
) -> None:
    """`devices`: replicas, or replicas and devices of each."""
    replicas, parts = devices if isinstance(devices, tuple) else (devices, 1)
    args = EngineArgs("model", data_parallel_size=replicas, tensor_parallel_size=parts)
    nodes = [{"Alive": True}, {"Alive": True}, {"Alive": False}]
    ray = SimpleNamespace(cluster_resources=lambda: resources, nodes=lambda: nodes)
    if expected is None:
        with pytest.raises(ValueError, match="engines need"):
            _workers(ray, options, args)
    else:
        assert _workers(ray, options, args) == expected


def test_what_is_said_of_a_failure() -> None:
    text = (
        "ray::submit() (pid=1)\n  File x\nRuntimeError: poison\n\njaxinfer.engine.errors.EngineDeadError: the engine "
        "is dead\n\nray.exceptions.UserCodeException: UDF failed.\nTo change retries, configure this."
    )
    assert _cause(RuntimeError(text)) == "jaxinfer.engine.errors.EngineDeadError: the engine is dead"
    assert _cause(RuntimeError("The node was lost.")) == "The node was lost."


@pytest.mark.parametrize("words", [["--ray-workers", "2"], ["--ray-gpus-per-worker", "1"], ["--ray"]])
def test_refusals(words: list[str], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "in.jsonl").write_text(request("a"))
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert main(["batch", *files, "--model", "/no/such/model", *words]) == 2
    message = "pip install 'jaxinfer[ray]'" if words == ["--ray"] else f"{words[0]}={words[1]} needs --ray"
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_worker_is_killed_and_the_job_goes_on(endless: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lengths = {f"request {place}": 60 + place % 40 for place in range(160)}
    lines = ["?", *(request(name, max_tokens=length) for name, length in lengths.items())]
    source.write_text("".join(line + "\n" for line in lines))
    done = '{"id": "jaxinfer-0", "custom_id": "request 7", "response": {"kept": true}, "error": null}\n'
    target.write_text(done)
    sizes = [word for name, value in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    script = Path(__file__).parents[2] / "scripts/batch_ray.py"
    words = ["-i", source, "-o", target, "--model", endless, "--enforce-eager", *sizes, "--ray", "local"]
    command = [sys.executable, script, *words, "--ray-workers", "2"]
    with (tmp_path / "errors").open("w") as errors, subprocess.Popen(command, stderr=errors) as process:
        try:
            wait_for_lines(target, 3, process)
            os.kill(worker_of(process.pid), signal.SIGKILL)
            before = target.read_bytes().count(b"\n")
            assert process.wait(timeout=200) == 0, (tmp_path / "errors").read_text()
        finally:
            process.kill()
    assert before < 150  # the worker that died had something to do
    assert "161 of 161 requests done, 1 errors in this run" in (tmp_path / "errors").read_text()
    text = target.read_text()
    assert text.startswith(done)
    results = [json.loads(line) for line in text.splitlines()]
    found = {result["custom_id"]: result["response"] for result in results}
    assert len(found) == len(results) == 161  # none lost, none doubled
    assert found.pop(None)["status_code"] == 400
    assert found.pop("request 7") == {"kept": True}
    texts = {name: response["body"]["choices"][0]["text"] for name, response in found.items()}
    del lengths["request 7"]
    assert texts == {name: ("bcdefgha" * 13)[:length] for name, length in lengths.items()}


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 200
    while path.read_bytes().count(b"\n") < count:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


def worker_of(pid: int) -> int:
    """The process of one of the job's engines: a descendant of `pid`, by the name that Ray gives it."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                names[int(folder.name)] = (folder / "cmdline").read_text()
            except OSError:  # it has ended
                continue

    def descends(process: int) -> bool:
        return process == pid or (process in parents and descends(parents[process]))

    return next(each for each, name in names.items() if "LineServer" in name and descends(each))
