"""The audit's command line, models and roofline; what it compiles is tests/deviceless."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.gpu_specs import GPU_SPECS
from jaxinfer.planning.roofline import decode_roofline
from scripts.gpu_audits.models import MODELS, model_named

ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/gpu_audit.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "--model" in done.stdout
    assert "llama-3-8b" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "tpu"), "invalid choice: 'tpu'"),
        (("--batch", "0"), "0 must be at least 1"),
        (("--model", "gpt-9"), "--model gpt-9 is neither a file nor one of llama-3-8b"),
        (("--op", "kv_write"), "--op kv_write chooses kernels of --all"),
        (("--output", "no/such/folder/x.md"), "--output no/such/folder/x.md must be a file in a folder that exists"),
        (("--gpu", "h200", "--gpu", "h100"), "--gpu was given 2 times"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_can_be_a_config_file(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_named(str(tmp_path)) == model_named(str(tmp_path / "config.json"))
    assert model_named(str(tmp_path)) == ModelConfig(320, 64, 96, 2, 4)


def test_roofline_of_llama_3_8b() -> None:
    """By hand: 8,030,261,248 parameters, 525,336,576 of them in the embedding table."""
    roofline = decode_roofline(MODELS["llama-3-8b"], batch=32, context=2047, param_bytes=2 * 8_030_261_248)
    assert roofline.weight_bytes == 2 * (8_030_261_248 - 525_336_576 + 32 * 4096)
    assert roofline.kv_bytes == 32 * 2048 * 131_072  # 128 KiB a token
    assert roofline.logits_bytes == 2 * 32 * 128256 * 2
    assert roofline.flops == 32 * (2 * 7_504_924_672 + 4 * 32 * 32 * 128 * 2047)
    assert roofline.memory_seconds(GPU_SPECS["h200"]) == pytest.approx(4.92e-3, rel=0.01)
    assert roofline.compute_seconds(GPU_SPECS["h200"]) == pytest.approx(0.52e-3, rel=0.02)


def test_a_tied_table_is_read_whole() -> None:
    config = MODELS["smollm2-135m"]
    roofline = decode_roofline(config, batch=1, context=1, param_bytes=2 * 134_515_008)
    assert roofline.weight_bytes == 2 * 134_515_008
    attention = 4 * 30 * 9 * 64
    assert roofline.flops == 2 * 134_515_008 + attention


def test_two_devices_share_the_cache() -> None:
    one, two = (decode_roofline(MODELS["llama-3-8b"], 32, 100, 10**10, count) for count in (1, 2))
    assert two.kv_bytes == one.kv_bytes / 2
