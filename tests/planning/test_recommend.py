"""recommend_config: what everybody who serves models would say, and what must hold for every answer."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxinfer.planning import PRESETS, kv_token_size, model_weight_size, recommend_config
from jaxinfer.planning.candidates import Question, best_plan, candidates, splits
from jaxinfer.planning.engine_support import engine_refusals
from jaxinfer.planning.formulas import count_parameters
from jaxinfer.planning.gpu_names import NamedGPU
from jaxinfer.planning.gpu_specs import GPU_SPECS
from jaxinfer.planning.memory_plan import Setting, memory_plan, most_seqs, needed_blocks
from jaxinfer.planning.planned_model import planned_model
from jaxinfer.planning.recommend import DEFAULT_UTILIZATION
from jaxinfer.planning.roofline import decode_roofline
from jaxinfer.startup.args import EngineArgs

SIXTEEN_BITS, EIGHT_BITS, FOUR_BITS = {"fp16", "bf16"}, {"int8", "fp8"}, {"awq", "gptq", "int4", "nf4"}
MODELS = ("qwen2.5-0.5b", "llama-2-7b", "qwen2.5-7b", "mixtral-8x7b", "llama-3.1-70b", "qwen2.5-72b", "gemma-2b")
DATA = Path(__file__).parents[1] / "data"
BY_MEMORY = sorted(GPU_SPECS, key=lambda name: GPU_SPECS[name].memory_bytes)

models = st.sampled_from([*MODELS, 3, 7, "13B", 72])
gpus = st.sampled_from(BY_MEMORY)
requests = st.integers(1, 2000)
contexts = st.integers(1, 4096)


@pytest.mark.parametrize("concurrency", [100, 256, 500])
@pytest.mark.parametrize("model", [7, "qwen2.5-7b"])
def test_7b_on_an_a100_runs_unquantised_with_hundreds_of_sequences(model: Any, concurrency: int) -> None:
    plan = recommend_config("A100 80G", model, concurrency)
    assert plan["tp"] == 1 and plan["quant"] in SIXTEEN_BITS
    assert plan["max_seqs"] == concurrency
    assert "error" not in plan


def test_small_weights_stay_in_16_bits() -> None:
    """Of an A100's 80 GB they are a sixth: 4 bits would hold an eighth more requests."""
    plan = recommend_config("A100 80G", 7, 1000)
    assert plan["quant"] in SIXTEEN_BITS and plan["kv_cache_dtype"] == "int8" and 500 < plan["max_seqs"] < 1000
    assert any("of the 1000 requests run at a time" in reason for reason in plan["reasons"])


@pytest.mark.parametrize("concurrency", [1, 16, 64])
def test_72b_on_an_a100_needs_four_bits(concurrency: int) -> None:
    plan = recommend_config("A100 80G", 72, concurrency)
    assert plan["tp"] == 1 and plan["quant"] in FOUR_BITS and plan["max_seqs"] == concurrency


@pytest.mark.parametrize(("concurrency", "context"), [(4, 32768), (16, 32768), (64, 32768), (8, 16384)])
def test_7b_on_a_4090_with_a_long_context_wants_fewer_bits(concurrency: int, context: int) -> None:
    plan = recommend_config("4090 24G", 7, concurrency, context)
    assert plan["tp"] == 1 and plan["quant"] in EIGHT_BITS | FOUR_BITS
    short = recommend_config("4090 24G", 7, 4, context=2048)
    assert short["quant"] in SIXTEEN_BITS


@pytest.mark.parametrize("gpu", ["4090", "4x 4090"])
def test_72b_on_4090s_needs_several_and_four_bits(gpu: str) -> None:
    plan = recommend_config(gpu, "72B", 16)
    assert plan["tp"] == 4 and plan["quant"] in FOUR_BITS and plan["max_seqs"] == 16


def test_70b_on_larger_cards() -> None:
    assert recommend_config("B200", "llama-3.1-70b", 8)["quant"] in SIXTEEN_BITS
    assert recommend_config("2x H100", "llama-3.1-70b", 8)["quant"] in EIGHT_BITS
    four = recommend_config("4x H100", "llama-3.1-70b", 8)
    assert four["quant"] in SIXTEEN_BITS and four["tp"] == 4


def test_max_seqs_follows_the_concurrency() -> None:
    found = [recommend_config("L4", 7, concurrency)["max_seqs"] for concurrency in (1, 2, 8, 64, 512)]
    assert found[:3] == [1, 2, 8] and found == sorted(found) and found[-1] < 512


def test_it_reads_as_a_mapping_and_says_why() -> None:
    plan = recommend_config("h200", "llama-3-8b", 32, context=8192)
    assert dict(plan) == {key: plan[key] for key in plan} and len(plan) == len(dict(plan))
    assert plan.get("error") is None and "error" not in plan and plan.error is None
    assert plan["tp"] == plan.tp and plan["max_model_len"] == 8192
    memory = plan["memory"]
    assert sum(memory[part] for part in ("weights", "kv_cache", "sampling", "scratch")) == memory["total"]
    assert memory["total"] <= memory["budget"] < memory["device"] == GPU_SPECS["h200"].memory_bytes
    assert memory["weights"] == 2 * 8_030_261_248
    assert memory["kv_cache"] == plan["num_blocks"] * 16 * 131_072
    assert any("16.1 GB of the 138.1 GB" in reason for reason in plan["reasons"])
    with pytest.raises(KeyError):
        plan["nothing"]


def test_roofline_of_a_decode_step() -> None:
    """Llama-3-8B in 16 bits reads 15 GB of weights a step at 4.8 TB/s, and 16 requests of 1,024 tokens 2.1 GB."""
    plan = recommend_config("h200", "llama-3-8b", 16, context=3072)
    seconds = (2 * (8_030_261_248 - 128256 * 4096) + 16 * 1024 * 131_072) / 4.8e12
    assert plan["tokens_per_second"] == pytest.approx(16 / seconds, rel=0.01)
    eight_bit = recommend_config("h200", "llama-3-8b", 16, context=3072, quant="fp8", kv_cache_dtype="fp8")
    assert 1.6 < eight_bit["tokens_per_second"] / plan["tokens_per_second"] < 2


def test_windowed_layers_read_their_window() -> None:
    """Gemma 2: of 42 layers one half sees 8,192 positions, the other 4,096; a position is 8,192 bytes a layer."""
    roofline = decode_roofline(PRESETS["gemma-2-9b"], 2, 8192, 10**10)
    assert roofline.kv_bytes == 2 * (21 * 8192 + 21 * 4096 + 42) * 8192


def test_given_choices_stay() -> None:
    plan = recommend_config("A100 80G", 7, 8, tp=2, quant="int8", kv_cache_dtype="int4", gpu_memory_utilization=0.5)
    assert (plan.tp, plan.quant, plan.kv_cache_dtype) == (2, "int8", "int4")
    assert plan["memory"]["budget"] == int(0.5 * GPU_SPECS["a100-80g"].memory_bytes)
    assert recommend_config("h200", 7, 8, kv_cache_dtype="bf16").kv_cache_dtype == "auto"
    full = recommend_config("A100 80G", 7, 256, mean_context=4096, kv_cache_dtype="auto")
    assert full["kv_tokens"] >= full["max_seqs"] * 4096 and full["max_seqs"] < 256


@pytest.mark.filterwarnings("ignore:the checkpoint's")
def test_a_quantised_checkpoint_stays_as_it_is() -> None:
    """Its own method goes to the engine and its own bits are counted; what does not fit is not remedied by others."""
    folder = DATA / "quantised/ct_w4a16"
    plan = recommend_config("l4", folder, 8)
    arguments = plan["engine_arguments"]
    assert (plan.quant, arguments["quantization"]) == ("int4", "compressed-tensors")
    assert EngineArgs("model", **arguments).quantization == "compressed-tensors"
    count = count_parameters(planned_model(folder).config)
    assert plan["memory"]["weights"] == 6 * count.linear / 8 + 2 * (count.total - count.linear)  # groups of 32
    assert recommend_config("l4", folder, 8, quant="compressed-tensors")["memory"] == plan["memory"]
    with pytest.raises(ValueError, match="quant='int8' was asked for, but ct_w4a16 is quantised as compressed-tensors"):
        recommend_config("l4", folder, 8, quant="int8")
    assert recommend_config("l4", DATA / "quantised/fp8_block", 8)["engine_arguments"]["quantization"] == "fp8"
    refused = recommend_config("l4", folder, 8, gpu_memory_utilization=1e-4, kv_cache_dtype="auto")["error"]
    assert "in int4 the weights" in refused and "weights in fp16" not in refused


def test_gpus_to_spare_are_mentioned() -> None:
    plan = recommend_config("8x H100", 7, 64)
    assert plan.tp == 1 and any("1 of 8 GPUs are used" in reason for reason in plan.reasons)
    assert any("says nothing of the memory" in reason for reason in recommend_config("A100", 7, 1).reasons)


@pytest.mark.parametrize(
    ("asked", "remedies"),
    [
        ({"gpu": "a100 40g", "model_size": 72, "num_gpus": 1}, ("2 x a100-40g", "as many of a100-80g")),
        ({"gpu": "4090", "model_size": 14, "quant": "fp16", "tp": 1}, ("in fp8", "2 x rtx4090 with weights in fp16")),
        (
            {"gpu": "l4", "model_size": "llama-3.1-8b", "context": 131072, "tp": 1, "kv_cache_dtype": "auto"},
            ("a context of up to", "the cache in int8 on 1 x l4"),
        ),
    ],
)
def test_what_does_not_fit_says_what_would(asked: dict[str, Any], remedies: tuple[str, ...]) -> None:
    plan = recommend_config(**asked)
    assert "error" in plan and "tp" not in plan
    for remedy in remedies:
        assert remedy in plan["error"]


def test_the_remedies_work() -> None:
    asked: dict[str, Any] = {"gpu": "l4", "model_size": "llama-3.1-8b", "quant": "fp16", "kv_cache_dtype": "auto"}
    refused = recommend_config(**asked, context=131072, tp=1)["error"]
    words = refused.split()
    fits = int(words[words.index("to", words.index("up")) + 1])
    assert "error" not in recommend_config(**asked, context=fits, tp=1)
    assert "error" in recommend_config(**asked, context=fits + 1, tp=1)
    assert "error" not in recommend_config(**(asked | {"quant": None, "kv_cache_dtype": None}), context=131072, tp=1)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"concurrency": 0}, "concurrency=0"),
        ({"context": 8193}, "context=8193 exceeds the 8192 positions"),
        ({"tp": 3}, "tp=3 must divide the 8 KV heads, 32 query heads"),
        ({"tp": 2, "num_gpus": 1}, "tp=2 is more than the 1 GPUs"),
        ({"gpu": "2x h100", "num_gpus": 4}, "num_gpus=4 contradicts the 2 GPUs"),
        ({"quant": "int3"}, "quant='int3'"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype='int3'"),
        ({"gpu": "A100 80G", "kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' needs compute capability 8.9"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        ({"gpu": "tpu-v5e"}, "gpu='tpu-v5e'"),
    ],
)
def test_bad_input_is_named(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recommend_config(**({"gpu": "h100", "model_size": "llama-3-8b"} | asked))


def test_the_engine_is_asked_what_it_can_run() -> None:
    """Not by a list of its own: whatever EngineArgs refuses is said, and nothing else."""
    plan = recommend_config("4x 4090", 72, 16)
    refused = engine_refusals(plan["engine_arguments"])
    assert [reason for reason in plan.reasons if "cannot run it" in reason] == [
        f"this version of jaxinfer cannot run it: {reason}" for reason in refused
    ]
    plain = recommend_config("h200", 7, 8)["engine_arguments"]
    assert engine_refusals(plain) == ()
    EngineArgs("model", **plain)
    assert engine_refusals({"block_size": 0}) and engine_refusals({"quantization": "no such"})
    assert EngineArgs("model").gpu_memory_utilization == DEFAULT_UTILIZATION


@given(gpus, models, requests, contexts, st.sampled_from([None, 1, 2, 3, 8]))
@settings(max_examples=30, deadline=None)
def test_what_is_recommended_fits(gpu: str, model: Any, concurrency: int, context: int, num_gpus: int | None) -> None:
    plan = recommend_config(gpu, model, concurrency, context, num_gpus=num_gpus)
    config = planned_model(model).config
    if "error" in plan:
        counts = [count for count in range(1, (num_gpus or 8) + 1) if splits(config, count)]
        weights = [model_weight_size(config, "awq", count) for count in counts]
        room = [0.92 * GPU_SPECS[gpu].memory_bytes - size for size in weights]
        assert all(
            left < context * kv_token_size(config, "int4", count) + 2e9
            for left, count in zip(room, counts, strict=True)
        )
        return
    assert plan.max_seqs <= concurrency and plan.tp <= (num_gpus or 8)
    assert config.num_attention_heads % plan.tp == config.num_key_value_heads % plan.tp == 0
    memory = plan["memory"]
    assert memory["weights"] == model_weight_size(config, plan.quant, plan.tp)
    assert memory["kv_cache"] == plan.num_blocks * 16 * kv_token_size(config, plan.kv_cache_dtype, plan.tp)
    assert memory["total"] <= memory["budget"]
    assert plan.kv_tokens >= context
    # A third of the context on average, and the rest once for each root of the requests.
    mean = -(-context // 3)
    assert plan.kv_tokens >= plan.max_seqs * mean + plan.max_seqs**0.5 * (context - mean) - 16
    if plan.max_seqs < concurrency:
        more = replace(plan.plan.setting, max_seqs=plan.max_seqs + 1)  # type: ignore[union-attr]
        assert not memory_plan(more).fits


@given(gpus, models, requests, contexts)
@settings(max_examples=25, deadline=None)
def test_more_asked_is_never_more_served(gpu: str, model: Any, concurrency: int, context: int) -> None:
    def served(concurrency: int, context: int) -> int:
        plan = recommend_config(gpu, model, concurrency, context, num_gpus=1, kv_cache_dtype="int8")
        return plan.max_seqs

    base = served(concurrency, context)
    assert served(concurrency + 1, context) >= base  # more requests wait, none the fewer run
    assert served(concurrency, min(context + 64, 4096)) <= base


@given(models, requests, contexts, st.sampled_from(["fp16", "int8", "awq"]), st.sampled_from(["auto", "int8", "int4"]))
@settings(max_examples=25, deadline=None)
def test_more_memory_holds_more(model: Any, concurrency: int, context: int, quant: str, kv_dtype: str) -> None:
    config, spec = planned_model(model).config, GPU_SPECS["h100"]
    setting = Setting(config, spec, context, concurrency, quant=quant, kv_dtype=kv_dtype)
    held = [
        plan.setting.max_seqs if (plan := most_seqs(replace(setting, gpu=replace(spec, memory_bytes=size)))) else 0
        for size in (10**10, 3 * 10**10, 8 * 10**10, 2 * 10**11)
    ]
    assert held == sorted(held)


@pytest.mark.parametrize("concurrency", [1, 32, 400])
@pytest.mark.parametrize("model", MODELS)
def test_a_larger_card_serves_no_fewer(model: str, concurrency: int) -> None:
    served = [recommend_config(gpu, model, concurrency, num_gpus=1).max_seqs for gpu in BY_MEMORY]
    assert served == sorted(served), dict(zip(BY_MEMORY, served, strict=True))


@given(gpus, models, requests)
@settings(max_examples=30, deadline=None)
def test_nothing_is_quantised_without_need(gpu: str, model: Any, concurrency: int) -> None:
    found = planned_model(model)
    spec = GPU_SPECS[gpu]
    question = Question(NamedGPU(gpu, spec, None), found, Setting(found.config, spec, 1024, concurrency), num_gpus=1)
    plan = best_plan(question)
    assume(plan is not None)
    less_lossy = candidates(question, 1)[: candidates(question, 1).index(replace(plan.setting, max_seqs=concurrency))]
    for setting in less_lossy:
        other = most_seqs(setting)
        tight = other is not None and other.weights > 0.9 * other.budget
        assert other is None or tight or other.setting.max_seqs < concurrency


def test_needed_blocks() -> None:
    """By hand, blocks of 16: one request of 3,072 tokens takes 192 and the padding block; 64 of them 64 x 1024 +
    8 x 2048 tokens, and half a block of 63."""
    setting = Setting(PRESETS["llama-3-8b"], GPU_SPECS["h200"], 3072, 1)
    assert needed_blocks(setting) == 193
    assert needed_blocks(replace(setting, max_seqs=64)) == (64 * 1024 + 8 * 2048) // 16 + 1 + 31
    assert needed_blocks(replace(setting, max_seqs=64, mean_context=3072)) == 64 * 192 + 1 + 31


def test_windowed_models_hold_what_is_in_sight() -> None:
    """With a window of 1,024 in every layer: a step of 2,048 tokens sees 3,071 positions, a decode step 1,024; these
    lie in 193 and 65 blocks at most. A layer without a window keeps everything."""
    windowed = replace(PRESETS["mistral-7b"], sliding_window=1024)
    setting = Setting(windowed, GPU_SPECS["h200"], 32768, 1)
    assert needed_blocks(setting) == 193 + 1
    many = replace(setting, max_seqs=100, mean_context=32768)
    assert needed_blocks(many) == 100 * 65 + (193 - 65) + 1 + 49
    mixed = replace(windowed, window_layers=(False,) + (True,) * 31)
    assert needed_blocks(replace(setting, model=mixed)) == 32768 // 16 + 1


def test_order_of_precision() -> None:
    """Eight-bit weights come first where weights are most of it, an eight-bit cache where the cache is."""
    for gpu, first in (("rtx4090", "fp8"), ("h200", "fp16")):
        found, spec = planned_model(7), GPU_SPECS[gpu]
        question = Question(NamedGPU(gpu, spec, None), found, Setting(found.config, spec, 1024, 8))
        ways = [(way.quant, way.kv_dtype) for way in candidates(question, 1)]
        assert ways[0] == ("fp16", "auto") and ways[1][0] == first
        assert all(way != other for way, other in pairwise(ways))
    a100 = replace(question, setting=replace(question.setting, gpu=GPU_SPECS["a100-40g"]))
    assert {way.quant for way in candidates(a100, 1)} == {"fp16", "int8", "awq"}


def test_a_folder_can_be_planned_for() -> None:
    plan = recommend_config("l4", Path(__file__).parents[1] / "data/tiny_llama", 4)
    assert plan.model == "tiny_llama" and plan.max_model_len == 128
