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
    paths = re.findall(r"`?((?:jaxinfer|pallas_kernels|scripts|tests)/[\w/.-]*\w)", README)
    assert len(paths) > 10
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_programs_import_what_there_is() -> None:
    assert len(PROGRAMS) >= 3
    for program in PROGRAMS:
        compile(program, "README.md", "exec")
        exec("\n".join(re.findall(r"^(?:from|import) .*", program, re.MULTILINE)), {})


@pytest.mark.slow
def test_programs_without_a_download_run(tmp_path: Path) -> None:
    programs = [program for program in PROGRAMS if not re.search("smollm2|-AWQ|meta-llama", program)]
    assert len(programs) == 2
    for program in programs:
        words = [sys.executable, "-c", program]
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
