"""Tensor parallelism over processes: two of them, each with one CPU device, run the same calls."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "two_processes" / "engine_of_two.py"


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each process found."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    address = free_address()
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), address],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, ended, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in ended]


@pytest.mark.slow
def test_outputs_are_those_of_one_device(found: list[dict[str, Any]]) -> None:
    first, second = found
    expected, expected_new = first.pop("one device"), first.pop("one device, new")
    scores = first.pop("one device, scores")
    assert first == second  # everything, to the last bit
    assert first["devices"] == 2 and first["num_preemptions"] > 0
    assert [ids for ids, _ in expected] != [ids for ids, _ in expected_new]
    for mine, reference in (
        (first["two processes"], expected),
        (first["after sleep"], expected),
        (first["new"], expected_new),
        (first["after refusals"], expected_new),
    ):
        assert [ids for ids, _ in mine] == [ids for ids, _ in reference]
        assert [logprob for _, logprob in mine] == pytest.approx([logprob for _, logprob in reference], abs=1e-3)
    for mine, reference in zip(first["scores"], scores, strict=True):
        assert mine == pytest.approx(reference, abs=1e-3)
    assert "different requests: those of processes 1 are not those of process 0" in first["other requests"]
    assert "different requests" in first["other params"]
    assert "different settings" in first["other settings"]
    assert "an AsyncLLM does not span processes" in first["async"]
    assert "tensor_parallel_size=2, the devices of all processes" in first["too many"]
