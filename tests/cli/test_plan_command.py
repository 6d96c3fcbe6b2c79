"""`jaxinfer plan`: what it prints, and how it fails."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.planning import recommend_config

DATA = Path(__file__).parents[1] / "data"


def test_a_plan(jaxinfer: Any) -> None:
    assert jaxinfer("plan", "llama-3.1-8b", "--gpu", "h200", "--context", "32k", "--concurrency", "64") == 0
    text = jaxinfer.stdout
    assert text.startswith("llama-3.1-8b on h200: 64 requests at a time, context 32,000\n")
    assert "weights    16.06 GB  in fp16\n" in text
    assert "of 138.10 GB, of a card of 150.11 GB" in text
    assert "* a decode step of 64 requests is bound by reading memory" in text
    options = text.rstrip().splitlines()[-1]
    assert "--max-model-len 32000" in options and "--quantization" not in options
    bar = next(line for line in text.splitlines() if line.startswith("["))
    assert len(bar) == 66
    assert abs(bar.count("#") / 64 - 16.06 / 150.1) < 0.02 and abs(bar.count("=") / 64 - 121.7 / 150.1) < 0.02
    assert abs(bar.count(".") / 64 - 0.08) < 0.02


def test_json_is_the_recommendation(jaxinfer: Any) -> None:
    words = ["plan", "72B", "--gpu", "4x 4090", "--concurrency", "16", "--json"]
    assert jaxinfer(*words) == 0
    (facts,) = jaxinfer.json_lines()
    expected = recommend_config("4x 4090", 72, 16)
    assert facts == json.loads(json.dumps(dict(expected)))
    assert facts["tp"] == 4 and facts["quant"] == "awq"
    assert any(reason.startswith("4 GPUs: on one ") for reason in facts["reasons"])


def test_given_choices(jaxinfer: Any) -> None:
    words = [
        "plan",
        DATA / "tiny_llama",
        "--gpu",
        "2x l4",
        "--tp",
        "2",
        "--quantization",
        "int8",
        "--kv-cache-dtype",
        "int4",
    ]
    words += ["--context", "128", "--mean-context", "64", "--max-num-batched-tokens", "64", "--block-size", "8"]
    assert jaxinfer(*words, "--gpu-memory-utilization", "0.5", "--json") == 0
    (facts,) = jaxinfer.json_lines()
    assert (facts["tp"], facts["quant"], facts["kv_cache_dtype"], facts["block_size"]) == (2, "int8", "int4", 8)
    assert facts["memory"]["budget"] == facts["memory"]["device"] // 2


def test_a_quantised_checkpoint(jaxinfer: Any) -> None:
    assert jaxinfer("plan", DATA / "quantised/bnb_int8", "--gpu", "l4") == 0
    assert "in int8\n" in jaxinfer.stdout
    assert "--quantization bitsandbytes" in jaxinfer.stdout.rstrip().splitlines()[-1]


def test_what_does_not_fit(jaxinfer: Any) -> None:
    assert jaxinfer("plan", "72B", "--gpu", "4090", "--num-gpus", "1", "--json") == 2
    (facts,) = jaxinfer.json_lines()
    assert "2 x rtx4090" in facts["error"] and facts["error"] in jaxinfer.stderr


def test_kv_table(jaxinfer: Any) -> None:
    assert jaxinfer("plan", "--kv-table") == 0
    line = next(line for line in jaxinfer.stdout.splitlines() if line.startswith("llama-3-8b "))
    heading, sizes = ["llama-3-8b", "GQA", "32", "/", "8"], [131_072, 67_584, 67_584, 34_816, 524_288, 16_384]
    assert line.split() == [*heading, *(f"{size:,}" for size in sizes)]
    assert jaxinfer("plan", "--kv-table", "--json") == 0
    assert json.loads(jaxinfer.stdout)[0]["model"] == "smollm2-135m"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["7B"], "give a MODEL and --gpu"),
        ([], "give a MODEL and --gpu"),
        (["7B", "--gpu", "v100"], "gpu='v100' is not a known GPU"),
        (["./nowhere", "--gpu", "l4"], "does not exist"),
        (["7B", "--gpu", "l4", "--context", "0"], "context=0"),
        (["7B", "--gpu", "l4", "--quant", "int3"], "quant='int3'"),
        (["7B", "--gpu", "h200", "--compile", "--quant", "fp32"], "quant='fp32' cannot be compiled"),
    ],
)
def test_bad_input(jaxinfer: Any, words: list[str], message: str) -> None:
    assert jaxinfer("plan", *words) == 2
    assert message in jaxinfer.stderr


def test_compiling_without_the_plugin_says_what_to_install() -> None:
    """In a process of its own: --compile keeps JAX on the CPU. The plugin is hidden where it is installed."""
    program = (
        "import sys; sys.modules['jax_plugins'] = None; sys.modules['jax_cuda12_plugin'] = None\n"
        "import importlib.metadata as m; m.entry_points = lambda **k: []\n"
        "from jaxinfer.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", program, "plan", str(DATA / "tiny_llama"), "--gpu", "l4", "--compile"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "pip install jax-cuda12-plugin==" in done.stderr and "nvidia-cuda-nvcc-cu12`" in done.stderr


def test_a_plan_needs_no_jax() -> None:
    program = "import sys; from jaxinfer.cli.main import main; main(sys.argv[1:]); print('jax' in sys.modules)"
    words = [sys.executable, "-c", program, "plan", "7", "--gpu", "h200"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
