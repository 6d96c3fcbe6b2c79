"""Runs the tests of `several_devices` in a process of their own, whose CPU counts as nine devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "several_devices"


@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_nine_devices(marked: str) -> None:
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "9"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marked, str(FOLDER)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
