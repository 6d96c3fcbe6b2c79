"""scripts/gpu_audit.py, run as a person runs it, on a model and a kernel that compile quickly."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/gpu_audit.py"


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_step_on_two_gpus(tmp_path: Path) -> None:
    output = tmp_path / "audit.txt"
    text = run(
        *("--gpu", "a100-80g", "--model", "qwen2.5-0.5b", "--tp", "2"),
        *("--batch", "4", "--layers", "3", "--output", str(output)),
    )
    assert "qwen2.5-0.5b, decode of 4 rows of 2048 positions, bfloat16, on 2 x NVIDIA A100" in text
    assert "updated in place: all of it" in text
    assert "CUDA graphs: 9; launches outside: 8 (AllReduce)" in text
    assert "attn/rope_kv_write/pallas_call" in text
    assert "(an assumption)" in text
    assert output.read_text() == text


def test_the_matrix() -> None:
    text = run("--all", "--gpu", "h200", "--op", "block_copy", "--jobs", "1")
    assert "6 programs, 6 kernels, 0 faults." in text
    assert text.count("block_copy") == 6
