"""EngineArgs: vLLM's names and defaults, checks, and refusals by name."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxinfer
from jaxinfer import AsyncEngineArgs, EngineArgs
from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.startup.loading import make_tokenizer
from jaxinfer.startup.quantization import QuantOptions
from jaxinfer.startup.unbuilt import UNBUILT


def test_defaults_are_vllms() -> None:
    args = EngineArgs("m")
    assert (args.model, args.dtype, args.seed, args.block_size, args.max_logprobs) == ("m", "auto", 0, 16, 20)
    assert (args.gpu_memory_utilization, args.scheduling_policy, args.tokenizer_mode) == (0.92, "fcfs", "auto")
    assert args.max_model_len is args.max_num_seqs is args.max_num_batched_tokens is args.tokenizer is None
    assert not args.enforce_eager and not args.skip_tokenizer_init and args.generation_config == "auto"


def test_arguments_are_kept_and_can_be_replaced() -> None:
    numpy = EngineArgs("m", seed=np.int64(7), max_num_seqs=np.int32(3))
    assert type(numpy.seed) is int is type(numpy.max_num_seqs)  # random.Random takes no other
    args = AsyncEngineArgs(model="m", max_num_seqs=3, logits_processors=[abs], tensor_parallel_size=1)
    assert (args.max_num_seqs, args.logits_processors) == (3, (abs,))
    changed = dataclasses.replace(args, seed=5)
    assert isinstance(changed, AsyncEngineArgs) and (changed.seed, changed.max_num_seqs) == (5, 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("spelling", ["half", "float16", "torch.float16"])
def test_dtype_spellings(spelling: str) -> None:
    assert EngineArgs("m", dtype=spelling.removeprefix("torch.")).dtype == "float16"
    assert EngineArgs("m", dtype=type("dtype", (), {"__str__": lambda self: spelling})()).dtype == "float16"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("fp8", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e5m2"),
        ("torch.float8_e4m3fn", "fp8_e4m3"),
        ("int8", "int8"),
        ("int4", "int4"),
        ("half", "float16"),
        (np.dtype("float32"), "float32"),
        (np.int8, "int8"),
    ],
)
def test_kv_cache_dtype_spellings(given: Any, kept: str) -> None:
    assert EngineArgs("m", kv_cache_dtype=given).kv_cache_dtype == kept


@pytest.mark.parametrize("name", ["nvfp4", "fp8_inc", "int3", None, 8])
def test_a_cache_dtype_that_is_not_there_is_refused_with_those_that_are(name: Any) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype=.* is not supported; use 'auto'.*'int8'.*'int4' or 'fp8'"):
        EngineArgs("m", kv_cache_dtype=name)


@pytest.mark.parametrize(
    ("arguments", "method"),
    [
        ({"quantization": "int8"}, "int8"),
        ({"quantization": "w8a8"}, "int8_w8a8"),
        ({"load_in_8bit": True}, "int8"),
        ({"load_in_4bit": True}, "fp4"),  # transformers' default
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "device_map": "auto"}, "nf4"),
        ({"load_in_8bit": False, "load_in_4bit": False, "device_map": None}, None),
    ],
)
def test_names_of_quantisation(arguments: dict[str, Any], method: str | None) -> None:
    assert EngineArgs("m", **arguments).quantization == method


class bfloat16:
    """As torch names it: str() of it is "torch.bfloat16"."""

    def __str__(self) -> str:
        return "torch.bfloat16"


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", bfloat16()])
def test_transformers_four_bits(dtype: Any) -> None:
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    args = EngineArgs("m", **four, bnb_4bit_use_double_quant=True)
    assert args.dtype == "bfloat16" and args.quant_options == QuantOptions(double_quant=True)
    assert EngineArgs("m", **{name: getattr(args, name) for name in EngineArgs.__dataclass_fields__ if name != "model"})


def test_modules_to_skip() -> None:
    skipped = QuantOptions(skip_modules=("lm_head", "down_proj"))
    args = EngineArgs("m", load_in_8bit=True, llm_int8_skip_modules=["lm_head", "down_proj"])
    assert args.quant_options == skipped
    config = {"llm_int8_skip_modules": ["lm_head", "down_proj"]}
    assert EngineArgs("m", quantization="int4", quantization_config=config).quant_options == skipped
    with pytest.raises(TypeError, match=r"must be a list of names, such as \['lm_head'\]"):
        EngineArgs("m", quantization="int8", quantization_config={"skip_modules": "lm_head"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"llm_int8_skip_modules": ["lm_head"]}, "needs load_in_8bit=True or load_in_4bit=True"),
        ({"quantization": "awq", "quantization_config": {"skip_modules": ["q_proj"]}}, "is the checkpoint's own"),
        ({"quantization_config": {"skip_modules": ["q_proj"]}}, "quantization_config without quantization"),
        ({"quantization": "int8", "quantization_config": {"skip_modules": ["("]}}, "no regular expression"),
        ({"quantization": "modelopt"}, "quantization='modelopt' is not supported: checkpoints in this format"),
        ({"quantization": "gptq", "quantization_config": {"group_size": 64}}, "group_size=64 is the checkpoint's own"),
        ({"quantization": "awq_marlin", "quantization_config": {"symmetric": False}}, "symmetric=False is of"),
        ({"quantization": "int3"}, "quantization='int3' is not supported; use one of int8"),
        ({"quantization": "none"}, "quantization='none' is not supported; .* or leave it out for floats"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "load_in_8bit=True contradicts load_in_4bit"),
        ({"load_in_8bit": True, "quantization": "nf4"}, "contradicts quantization='nf4'"),
        ({"load_in_4bit": True, "quantization": "nf4"}, "give only one of them, or bnb_4bit_quant_type='nf4' as well"),
        ({"bnb_4bit_quant_type": "nf4"}, "needs load_in_4bit=True"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "must be 'nf4' or 'fp4'"),
        (
            {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float16", "dtype": "bfloat16"},
            "bnb_4bit_compute_dtype='float16' contradicts dtype='bfloat16'",
        ),
        ({"device_map": "balanced"}, "device_map='balanced' must be 'auto'"),
        ({"quantization_config": {"group_size": 64}}, "quantization_config without quantization"),
        ({"quantization": "int4", "quantization_config": {"group_size": 100}}, "group_size=100 must be one of 16, 32"),
        ({"quantization": "fp8", "quantization_config": {"group_size": 64}}, "group_size=64 is of .int8. and 4 bits"),
        ({"quantization": "nf4", "quantization_config": {"symmetric": False}}, "symmetric=False is of"),
        ({"quantization": "int4", "quantization_config": {"double_quant": True}}, "double_quant=True is of"),
        ({"quantization": "int4", "quantization_config": {"desc_act": True}}, "unknown entry 'desc_act'"),
    ],
)
def test_quantisation_that_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineArgs("m", **arguments)


def test_transformers_config_object_is_told_what_to_give() -> None:
    with pytest.raises(TypeError, match="must be a mapping, .* BitsAndBytesConfig give load_in_8bit or load_in_4bit"):
        EngineArgs("m", quantization_config=object())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(UNBUILT))
def test_unbuilt_arguments_are_refused_by_name_unless_they_ask_for_nothing(name: str) -> None:
    for value in UNBUILT[name].accepted:
        assert EngineArgs("m", **{name: value}) == EngineArgs("m")
    with pytest.raises(ValueError, match=rf"{name}='something else' is not supported: .*Leave it out"):
        EngineArgs("m", **{name: "something else"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 0),
        ("enable_expert_parallel", 1),
        ("mesh", 2),
        ("axis_names", "model"),
        ("pipeline_parallel_size", 2),
        ("quantization", "torchao"),
        ("prefix_caching_hash_algo", "xxhash"),
        ("kv_cache_dtype_skip_layers", ["0"]),
        ("enable_lora", True),
        ("trust_remote_code", True),
        ("enable_chunked_prefill", False),
        ("cpu_offload_gb", 0.5),
        ("load_format", "dummy"),
        ("tokenizer_mode", "slow"),
    ],
)
def test_what_vllm_users_would_ask_for_is_refused(name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        EngineArgs("m", **{name: value})


def test_a_model_that_is_no_name() -> None:
    with pytest.raises(TypeError, match="model=7 must be a path"):
        EngineArgs(7)  # type: ignore[arg-type]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(TypeError, match=r"unknown argument max_sequences=3; .*max_num_seqs"):
        EngineArgs("m", max_sequences=3)


@pytest.mark.parametrize("share", [0, -0.1, 1.5, "0.9", None, True, math.nan])
def test_bad_memory_share(share: Any) -> None:
    with pytest.raises(ValueError, match="gpu_memory_utilization=.*share of the whole"):
        EngineArgs("m", gpu_memory_utilization=share)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"max_model_len": 0}, ValueError),
        ({"max_model_len": "32K"}, TypeError),
        ({"max_num_seqs": -1}, ValueError),
        ({"num_gpu_blocks_override": 0}, ValueError),
        ({"block_size": None}, TypeError),
        ({"seed": None}, TypeError),
        ({"seed": 2**63}, ValueError),
        ({"max_logprobs": -2}, ValueError),
        ({"dtype": "int8"}, ValueError),
        ({"scheduling_policy": "lifo"}, ValueError),
        ({"enforce_eager": 1}, TypeError),
        ({"compilation_cache_dir": True}, ValueError),
        ({"logits_processors": ["module.Class"]}, TypeError),
        ({"tokenizer": object()}, TypeError),
        ({"tokenizer": "t", "skip_tokenizer_init": True}, ValueError),
        ({"tokenizer_revision": "v1"}, ValueError),
        ({"hf_token": 7}, TypeError),
        ({"override_generation_config": {"temprature": 1}}, ValueError),
        ({"override_generation_config": "top_k"}, TypeError),
    ],
)
def test_bad_values_name_the_argument(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        EngineArgs("m", **arguments)


def test_importing_is_lazy_and_starts_nothing() -> None:
    program = (
        "import sys, threading, signal, os; before = dict(os.environ), signal.getsignal(signal.SIGINT)\n"
        "import jaxinfer; assert 'jax' not in sys.modules and 'numpy' not in sys.modules\n"
        "from jaxinfer import LLM, AsyncLLM, AsyncLLMEngine, EngineArgs, SamplingParams, TokensPrompt\n"
        "assert AsyncLLM is AsyncLLMEngine\n"
        "assert (dict(os.environ), signal.getsignal(signal.SIGINT)) == before and threading.active_count() == 1\n"
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_public_names_exist() -> None:
    for name in jaxinfer.__all__:
        assert getattr(jaxinfer, name) is not None
    assert set(jaxinfer.__all__) <= set(dir(jaxinfer))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        jaxinfer.Nothing  # noqa: B018


def test_a_checkpoint_without_a_tokenizer_names_the_argument_that_gives_one() -> None:
    checkpoint = open_checkpoint(Path(__file__).parents[1] / "data/tiny_llama")
    with pytest.raises(ValueError, match="neither tokenizer.json .*; add one; or give another with tokenizer=, --tok"):
        make_tokenizer(EngineArgs("m"), checkpoint)
    assert make_tokenizer(EngineArgs("m", skip_tokenizer_init=True), checkpoint) is None
