"""The command as a whole: help, exit statuses, messages."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxinfer._version import __version__
from jaxinfer.cli.engine_options import NO_OPTION, engine_args, field_texts, unbuilt_options
from jaxinfer.cli.main import build_parser
from jaxinfer.startup.args import EngineArgs

COMMANDS = (["generate"], ["chat"], ["batch"], ["bench"], ["bench", "throughput"], ["plan"], ["collect-env"], [])


def test_help_needs_no_jax() -> None:
    program = (
        "import sys; from jaxinfer.cli.main import main\n"
        "status = main(['generate', '--help'])\n"
        "print(status, sorted({'jax', 'numpy', 'flax', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help(jaxinfer: Any, words: list[str]) -> None:
    assert jaxinfer(*words, "--help") == 0
    assert "usage: jaxinfer" in jaxinfer.stdout and "--help" in jaxinfer.stdout


def test_version(jaxinfer: Any) -> None:
    assert jaxinfer("--version") == 0
    assert jaxinfer.stdout == f"jaxinfer {__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "usage:"),
        (["fly"], "invalid choice: 'fly'"),
        (["bench"], "BENCHMARK"),
        (["generate", "--prompt", "a"], "--model"),
        (["generate", "--model", "m", "--prompt", "a", "--max-tokenz", "3"], "--max-tokenz"),
        (["generate", "--model", "m", "--prompt", "a", "extra"], "extra"),
        (["generate", "--model", "m", "--prompt", "a", "--max-model-len", "1.5K"], "1.5K"),
        (["generate", "--model", "m", "--prompt", "a", "--max-num-seqs", "0"], "max_num_seqs=0"),
        (["generate", "--model", "m", "--prompt", "a", "--dtype", "int3"], "int3"),
        (["generate", "--model", "m", "--prompt", "a", "--temperature", "9"], "temperature=9"),
        (["generate", "--model", "m", "--prompt", "a", "--system", "b"], "--chat"),
        (["generate", "--model", "m", "--prompt", "a", "--chat", "--chat-template", "/no/such/file"], "/no/such/file"),
        (["generate", "--model", "m", "--prompt", "a", "--logprobs", "1"], "--json"),
        (["generate", "--model", "m", "--prompt", "a", "--pipeline-parallel-size", "2"], "pipeline_parallel_size=2"),
        (["generate", "--model", "m", "--prompt", "a", "-tp", "2"], "tensor_parallel_size=2 needs as many"),
        (["generate", "--model", "m", "--prompt", "a", "--enable-lora"], "enable_lora=True"),
        (["generate", "--model", "m", "--prompt", "a", "--no-enable-chunked-prefill"], "enable_chunked_prefill=False"),
        (["generate", "--model", "m", "--prompt", "a", "--no-such-option"], "unrecognized"),
        (["collect-env", "--tensor-parallel-size", "1"], "unrecognized"),
        (["generate", "--model", "/no/such/model", "--prompt", "a"], "/no/such/model"),
        (["batch", "--model", "m", "-i", "/no/such/file", "-o", "out"], "/no/such/file"),
        (["bench", "throughput", "--model", "m", "--input-len", "3", "--input-len-range", "1", "2"], "not allowed"),
        (["bench", "throughput", "--model", "m", "--output-len-range", "5", "2"], "from 5 to 2"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "",
)
def test_bad_input(
    jaxinfer: Any, words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert jaxinfer(*words) == 2
    assert message in jaxinfer.stderr and not jaxinfer.stdout


def test_options_reach_the_engine() -> None:
    words = ["--max-model-len", "4K", "--enforce-eager", "--dtype", "bfloat16", "--compilation-cache-dir", "none"]
    words += ["--override-generation-config", '{"top_k": 3}', "--gpu-memory-utilization", "0.5", "--seed", "7"]
    given = build_parser().parse_args(["batch", "-i", "a", "-o", "b", "--model", "m", *words])
    args = engine_args(given)
    assert args.model == "m" and args.max_model_len == 4096 and args.enforce_eager and args.dtype == "bfloat16"
    assert args.compilation_cache_dir is False and args.override_generation_config == {"top_k": 3}
    assert args.gpu_memory_utilization == 0.5 and args.seed == 7
    plain = engine_args(build_parser().parse_args(["batch", "-i", "a", "-o", "b", "--model", "m"]))
    assert plain.max_model_len is None and not plain.enforce_eager and plain.compilation_cache_dir is None


def test_every_field_has_an_option_with_a_text(jaxinfer: Any) -> None:
    texts = field_texts(EngineArgs)
    jaxinfer("batch", "--help")
    for name in EngineArgs.__dataclass_fields__:
        assert texts[name]
        assert (f"--{name.replace('_', '-')}" in jaxinfer.stdout) == (name not in NO_OPTION)
    assert texts["seed"] == "seeds the requests that bring no seed of their own, 0 to 2**63 - 1."
    assert texts["compilation_cache_dir"].endswith("is set in jax.config already stays.")


def test_options_of_vllm_keep_their_values() -> None:
    words = ["--pipeline-parallel-size", "2", "--enable-lora", "--no-enable-chunked-prefill", "--swap-space=4"]
    words += ["--load-format", "dummy"]
    assert unbuilt_options(words) == {
        "engine_pipeline_parallel_size": 2,
        "engine_enable_lora": True,
        "engine_enable_chunked_prefill": False,
        "engine_swap_space": 4,
        "engine_load_format": "dummy",
    }


def test_collect_env(jaxinfer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "very-secret")
    assert jaxinfer("collect-env", "--json") == 0
    (facts,) = jaxinfer.json_lines()
    assert facts["jaxinfer"] == __version__ and {"python", "jax", "jaxlib", "flax", "numpy", "cache"} <= set(facts)
    assert facts["devices"] == ["0: cpu cpu"] and "GiB" in facts["memory"]
    assert jaxinfer("collect-env") == 0
    assert "very-secret" not in jaxinfer.stdout and "os:" in jaxinfer.stdout


def test_a_reader_that_left_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "jaxinfer", "collect-env"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("error", "stdout", "status", "message"),
    [
        ("KeyboardInterrupt", "left", 130, ""),
        ("ValueError('bad')", "left", 2, "jaxinfer: error: bad\n"),
        ("ValueError('bad')", "/dev/full", 2, "jaxinfer: error: bad\n"),
        ("", "/dev/full", 2, "jaxinfer: error: [Errno 28] No space left on device\n"),
    ],
)
def test_output_that_cannot_be_written_adds_no_noise(
    error: str, stdout: str, status: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import sys; from jaxinfer.cli import collect_env, main\n"
        "def run(arguments):\n"
        f"    print('something'){'; raise ' * bool(error)}{error}\n"
        "    return 0\n"
        "collect_env.run = run\n"
        "sys.exit(main.main(['collect-env']))"
    )
    if stdout == "left":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(stdout, os.O_WRONLY)
    monkeypatch.setenv("PYTHONUNBUFFERED", "")  # something waits to be written at the end
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (status, message)


def test_characters_that_the_locale_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "from jaxinfer.cli import collect_env, main\n"
        "collect_env.collect = lambda: {'os': 'caf\\xe9'}\n"
        "main.main(['collect-env'])"
    )
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["os:", "caf\\xe9"]


def test_an_interrupt_while_loading_ends_the_process() -> None:
    program = (
        "import os, signal, sys, time\n"
        "from jaxinfer.cli.main import main\n"
        "from jaxinfer.startup import loading\n"
        "def load_engine(*args):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "loading.load_engine = load_engine\n"
        "sys.exit(main(['generate', '--model', 'm', '--prompt', 'a']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_traceback_on_demand(jaxinfer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXINFER_TRACEBACK", "1")
    with pytest.raises(ValueError, match="/no/such/model"):
        jaxinfer("generate", "--model", "/no/such/model", "--prompt", "a")
