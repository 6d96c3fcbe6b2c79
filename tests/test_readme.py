"""The README tells the truth: its commands parse, its files are there, its programs run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer.cli.main import build_parser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^jaxinfer (.+)$", README, re.MULTILINE)
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_commands_parse() -> None:
    assert len(COMMANDS) >= 4
    for command in COMMANDS:
        assert callable(build_parser().parse_args(shlex.split(command)).run)


def test_files_are_there() -> None:
    paths = re.findall(r"`?((?:jaxinfer|pallas_kernels|scripts|tests)/[\w/.]*\w)", README)
    assert len(paths) > 10
    assert not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_programs_run(smollm2_path: Path, tmp_path: Path, program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
