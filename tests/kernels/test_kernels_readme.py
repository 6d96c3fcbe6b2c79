"""pallas_kernels/README.md tells the truth: its example runs, its signatures are the real ones, its files are there."""

import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "pallas_kernels" / "README.md").read_text()
SIGNATURES = re.findall(r"^(\w+)\.(\w+)\(((?:.|\n)*?)\)(?=:| ->|\n    ->)", README, re.MULTILINE)


def test_the_example_runs() -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(program.strip().splitlines()) <= 12
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(6, 8, 64)\n"


def test_every_operation_has_its_signature() -> None:
    assert [name for _, name, _ in SIGNATURES] == [
        "paged_attention",
        "make_work_list",
        "flash_attention",
        "flash_attn_func",
        "kv_write",
        "rope_kv_write",
        "norm_gated_matmul",
        "quantized_matmul",
        "block_copy",
    ]


@pytest.mark.parametrize(("package", "name", "written"), SIGNATURES, ids=[name for _, name, _ in SIGNATURES])
def test_signatures_are_the_real_ones(package: str, name: str, written: str) -> None:
    real = inspect.signature(getattr(import_module(f"pallas_kernels.{package}"), name)).parameters
    without_shapes = re.sub(r"\[[^]]*\]", "", written)
    parts = [part.strip() for part in re.split(r",(?![^(]*\))", without_shapes)]
    assert [part.split("=")[0] for part in parts if part != "*"] == list(real)
    for part in parts:
        given, _, default = part.partition("=")
        if default:
            assert repr(real[given].default) == default


def test_files_are_there() -> None:
    paths = re.findall(r"`((?:scripts|tests|paged_attention|flash_attention|quantized_matmul)/[\w/.*]*)", README)
    assert len(paths) > 10
    for path in paths:
        root = ROOT if path.startswith(("scripts", "tests")) else ROOT / "pallas_kernels"
        assert list(root.glob(path)), path
    for name in re.findall(r"`(test_\w+\.py)`", README):
        assert (ROOT / "tests" / "kernels" / name).exists(), name
