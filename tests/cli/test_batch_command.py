"""jaxinfer batch."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 20}


def request(custom_id: str, body: dict[str, Any], url: str = COMPLETIONS) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {**GREEDY, **body}})


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def results(path: Path) -> dict[str | None, Any]:
    """By custom_id; every line is whole and no custom_id comes twice."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def texts(result: Any) -> list[str]:
    return [choice["text"] for choice in result["response"]["body"]["choices"]]


def test_responses_and_errors(jaxinfer: Any, letters: list[str], tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        request("chat", {"messages": [{"role": "user", "content": "a"}], "model": "tiny"}, CHAT),
        request("two", {"prompt": ["e", "c"], "max_tokens": 3}),
        "{not json",
        request("unknown", {"prompt": "a", "max_tokenz": 3}),
        request("long", {"prompt": ["a", "z" * 200]}),
        request("logprobs", {"prompt": "a", "logprobs": 9}),
        request("end", {"prompt": [104]}),
    )
    target = tmp_path / "out.jsonl"
    assert jaxinfer("batch", "-i", source, "-o", target, *letters, "--served-model-name", "tiny") == 0
    assert "7 of 7 requests done, 4 errors" in jaxinfer.stderr
    found = results(target)
    chat = found["chat"]
    assert set(chat) == {"id", "custom_id", "response", "error"} and chat["error"] is None
    assert set(chat["response"]) == {"status_code", "request_id", "body"} and chat["response"]["status_code"] == 200
    body = chat["response"]["body"]
    assert body["object"] == "chat.completion" and body["model"] == "tiny"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "bcdefgh"}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"] == {"prompt_tokens": 1, "total_tokens": 9, "completion_tokens": 8}
    assert texts(found["two"]) == ["fgh", "def"] and texts(found["end"]) == [""]
    for custom_id, named in ((None, "line 3"), ("unknown", "max_tokenz"), ("long", "200"), ("logprobs", "logprobs=9")):
        error = found[custom_id]
        assert error["response"]["status_code"] == 400 and error["response"]["body"] is None
        assert named in error["error"]


def test_resuming_adds_only_what_is_missing(jaxinfer: Any, letters: list[str], tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests = [request(name, {"prompt": name}) for name in "abc"]
    write(source, requests[0], "?")
    assert jaxinfer("batch", "-i", source, "-o", target, *letters) == 0
    first = target.read_text()
    write(source, requests[0], "?", *requests[1:])
    target.write_text(first + '{"id": "jaxinfer-12", "custom_id": "b", "resp')
    assert jaxinfer("batch", "-i", source, "-o", target, *letters) == 0
    assert "2 of 4 requests are done already" in jaxinfer.stderr
    assert target.read_text().startswith(first)
    found = results(target)
    assert set(found) == {"a", "b", "c", None} and texts(found["b"]) == ["cdefgh"]
    # All done: the model is not even looked at.
    whole = target.read_text()
    assert jaxinfer("batch", "-i", source, "-o", target, "--model", "/no/such/model") == 0
    assert target.read_text() == whole


@pytest.mark.parametrize("case", ["duplicate", "foreign", "notes", "same"])
def test_refused_before_anything_is_written(jaxinfer: Any, tmp_path: Path, case: str) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, request("a", {"prompt": "a"}), *([request("a", {"prompt": "b"})] if case == "duplicate" else []))
    if case == "foreign":
        write(target, json.dumps({"id": "jaxinfer-1", "custom_id": "other", "response": {}, "error": None}))
    elif case == "notes":
        write(target, "shopping list")
    elif case == "same":
        target = source
    before = target.read_text() if target.exists() else None
    assert jaxinfer("batch", "-i", source, "-o", target, "--model", "/no/such/model") == 2
    message = {"duplicate": "'a'", "foreign": "'other'", "notes": "not the result", "same": "input file"}[case]
    assert message in jaxinfer.stderr
    assert (target.read_text() if target.exists() else None) == before


@pytest.mark.timeout(60)
def test_a_pipe_is_refused(jaxinfer: Any, tmp_path: Path) -> None:
    """It would be empty when its lines are read for the second time."""
    source = tmp_path / "pipe"
    os.mkfifo(source)
    assert jaxinfer("batch", "-i", source, "-o", tmp_path / "out.jsonl", "--model", "/no/such/model") == 2
    assert f"{source} is not a file" in jaxinfer.stderr and not (tmp_path / "out.jsonl").exists()


def test_no_line_ends_the_job(jaxinfer: Any, letters: list[str], tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    call = {"function": {"name": "f", "arguments": "[" * 100_000}}
    lines = [
        request("deep", {"messages": [{"role": "assistant", "tool_calls": [call]}]}, CHAT),
        request("huge", {"prompt": "a", "temperature": 10**400}),
        request("half a pair", {"prompt": "\ud800"}),
        request("good \u2028 é", {"prompt": "f"}),
    ]
    source.write_bytes("\r\n".join(lines).encode())
    assert jaxinfer("batch", "-i", source, "-o", target, *letters) == 0
    found = {line["custom_id"]: line for line in map(json.loads, target.read_text().split("\n")[:-1])}
    assert {name: line["response"]["status_code"] for name, line in found.items()} == {
        "deep": 400,
        "huge": 400,
        "half a pair": 400,
        "good \u2028 é": 200,
    }
    assert texts(found["good \u2028 é"]) == ["gh"]


def test_a_line_that_was_mended_is_served(jaxinfer: Any, letters: list[str], tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, "?", request("b", {"prompt": "f"}))
    assert jaxinfer("batch", "-i", source, "-o", target, *letters) == 0
    write(source, request("a", {"prompt": "e"}), request("b", {"prompt": "f"}))
    assert jaxinfer("batch", "-i", source, "-o", target, *letters) == 0
    assert "1 of 2 requests are done already" in jaxinfer.stderr and "2 of 2 requests done" in jaxinfer.stderr
    assert texts(results(target)["a"]) == ["fgh"]


def test_the_progress_bar_leaves_no_thread(
    jaxinfer: Any, letters: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqdm.std.tqdm.monitor", None)
    threads = set(threading.enumerate())
    source = write(tmp_path / "in.jsonl", request("a", {"prompt": "f"}))
    assert jaxinfer("batch", "-i", source, "-o", tmp_path / "out.jsonl", *letters) == 0
    assert set(threading.enumerate()) <= threads


def test_an_interrupt_keeps_what_is_done(
    jaxinfer: Any, letters: list[str], tmp_path: Path, interrupt_at_step: Callable[[int], None]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, *(request(str(place), {"prompt": "f"}) for place in range(40)))
    interrupt_at_step(9)
    assert jaxinfer("batch", "-i", source, "-o", target, *letters) == 130
    done = results(target)
    assert 0 < len(done) < 40 and f"{len(done)} of 40 requests done" in jaxinfer.stderr
    assert jaxinfer("batch", "-i", source, "-o", target, *letters) == 0
    assert {tuple(texts(result)) for result in results(target).values()} == {("gh",)}
    assert len(results(target)) == 40


def test_a_dead_engine_leaves_its_requests_to_the_next_run(
    jaxinfer: Any, letters: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxinfer.runner.runner import ModelRunner

    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, *(request(str(place), {"prompt": "f"}) for place in range(12)))
    with monkeypatch.context() as patch:
        original, steps = ModelRunner.execute, []

        def execute(runner: ModelRunner, plan: Any) -> Any:
            steps.append(plan)
            if len(steps) == 7:
                raise RuntimeError("the device is gone")
            return original(runner, plan)

        patch.setattr(ModelRunner, "execute", execute)
        assert jaxinfer("batch", "-i", source, "-o", target, *letters) == 1
        assert "the device is gone" in jaxinfer.stderr
    assert 0 < len(results(target)) < 12
    assert jaxinfer("batch", "-i", source, "-o", target, *letters) == 0
    assert {tuple(texts(result)) for result in results(target).values()} == {("gh",)}


@contextlib.contextmanager
def job(*words: str | Path) -> Iterator[subprocess.Popen[str]]:
    """`jaxinfer batch` in a process of its own, which does not outlive the block."""
    command = [sys.executable, "-m", "jaxinfer", "batch", *map(str, words)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
def test_interrupted_then_killed_then_finished(jaxinfer: Any, endless: list[str], tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lengths = {f"request {place}": 15 + place % 20 for place in range(80)}
    write(source, *(request(name, {"prompt": "a", "max_tokens": length}) for name, length in lengths.items()))
    words = ["-i", source, "-o", target, *endless]
    with job(*words) as process:
        wait_for_lines(target, 3, process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130 and "Traceback" not in errors
    interrupted = len(results(target))
    assert 3 <= interrupted < 77
    with job(*words) as process:
        wait_for_lines(target, interrupted + 3, process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    whole = target.read_bytes()
    assert whole.count(b"\n") < 80
    assert jaxinfer("batch", *words) == 0
    assert target.read_bytes().startswith(whole[: whole.rfind(b"\n") + 1])
    found = results(target)
    assert {name: len(texts(result)[0]) for name, result in found.items()} == lengths
