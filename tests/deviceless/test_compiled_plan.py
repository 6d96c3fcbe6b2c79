"""What the planner's formulas say of a GPU's memory, against XLA's own numbers; a few layers of each model."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes
from jaxinfer.planning import PRESETS, recommend_config
from jaxinfer.planning.deviceless import gpu_target
from jaxinfer.planning.formulas import model_weight_size
from jaxinfer.planning.memory_plan import MemoryPlan
from jaxinfer.planning.step_memory import step_memory
from jaxinfer.runner.compiled_plan import CompiledPlan, compile_plan, plan_of_format
from jaxinfer.runner.deviceless_step import compile_step
from jaxinfer.runner.inputs import StepSpec

DATA = Path(__file__).parents[1] / "data"


def layers(name: str, count: int) -> ModelConfig:
    """The first layers of a preset."""
    model = PRESETS[name]
    windows = model.window_layers
    return replace(model, num_hidden_layers=count, window_layers=windows and windows[:count])


def both(gpu: str, model: ModelConfig, concurrency: int, **options: Any) -> tuple[MemoryPlan, CompiledPlan]:
    found = recommend_config(gpu, model, concurrency, **({"quant": "fp16", "kv_cache_dtype": "auto"} | options))
    assert found.plan is not None, found.error
    return found.plan, compile_plan(found.plan, found.gpu)


@pytest.mark.parametrize(
    ("gpu", "model", "concurrency", "options"),
    [
        ("h200", layers("llama-3-8b", 2), 64, {"context": 8192}),
        ("a100-80g", layers("qwen2.5-7b", 2), 256, {"tp": 2, "context": 32768, "kv_cache_dtype": "int8"}),
    ],
    ids=["llama-3-8b", "qwen2.5-7b on two, int8"],
)
def test_formulas_agree_with_xla(gpu: str, model: ModelConfig, concurrency: int, options: dict[str, Any]) -> None:
    plan, compiled = both(gpu, model, concurrency, **options)
    print(plan.weights, plan.kv_cache, plan.step, compiled)
    assert plan.total == pytest.approx(compiled.total, rel=0.03)
    assert compiled.weights == pytest.approx(plan.weights, rel=1e-4)
    assert compiled.kv_cache == plan.kv_cache
    # Not only because the cache is most of it.
    assert plan.total - plan.kv_cache == pytest.approx(compiled.total - compiled.kv_cache, rel=0.03)
    # The engine sizes its pool by these: too little would end in an allocation that fails.
    assert 0.95 * compiled.scratch < plan.step.scratch + plan.step.inputs < 1.25 * compiled.scratch
    if not options.get("tp"):
        assert (compiled.command_buffers, compiled.launches_outside_graphs) == (1, 0)
        assert compiled.launches > compiled.launches_a_layer * model.num_hidden_layers > 0


@pytest.mark.parametrize(
    ("gpu", "model", "num_tokens", "num_rows", "sampler"),
    [
        ("l4", layers("mixtral-8x7b", 1), 2048, 16, False),
        ("h200", layers("gpt2", 1), 4096, 8, False),
        ("b200", layers("gemma-2-9b", 1), 2048, 16, False),
    ],
    ids=["experts on l4", "no gate on h200", "norms behind layers on b200"],
)
def test_scratch_of_other_shapes(gpu: str, model: ModelConfig, num_tokens: int, num_rows: int, sampler: bool) -> None:
    """The formula bounds the largest step of shapes in which something else is widest, and not by much."""
    spec = StepSpec(num_tokens, num_rows, 64, sampler)
    report = compile_step(gpu_target(gpu), model, spec, num_pages=64).report
    memory = step_memory(model, num_tokens=num_tokens, num_rows=num_rows, table_width=64)
    print(report.temp_bytes / 2**20, memory.scratch / 2**20)
    assert 0.97 * report.temp_bytes <= memory.scratch + memory.inputs <= 1.25 * report.temp_bytes


@pytest.mark.parametrize(("gpu", "quant"), [("a100-80g", "awq"), ("h100", "fp8"), ("rtx4090", "nf4")])
def test_quantised_weights_take_what_the_formulas_say(gpu: str, quant: str) -> None:
    model = layers("llama-3-8b", 1)
    plan, compiled = both(gpu, model, 16, context=2048, quant=quant, max_num_batched_tokens=512)
    tables = 4 * 4 * 16 if quant == "nf4" else 0  # which the formulas leave out
    assert plan.weights == model_weight_size(model, quant) and compiled.weights == plan.weights + tables
    assert compiled.kv_cache == plan.kv_cache
    assert (compiled.command_buffers, compiled.launches_outside_graphs) == (1, 0)
    print(compiled.scratch / 2**20, (plan.step.scratch + plan.step.inputs) / 2**20)
    assert compiled.scratch < 1.1 * (plan.step.scratch + plan.step.inputs)


def test_groups_of_checkpoints_fit_the_rows_of_any_model() -> None:
    """SmolLM2's rows of 576 inputs are no multiple of 128."""
    model = PRESETS["smollm2-135m"]
    for quant in ("awq", "gptq"):
        plan = plan_of_format(quant, model)
        assert plan is not None and {storage.group for storage in plan.kept.values()} == {64, 128}
        param_shapes(model, "bfloat16", plan)


def test_what_cannot_be_compiled_is_named(tiny_config: ModelConfig) -> None:
    with pytest.raises(ValueError, match="quant='fp32' cannot be compiled; use one of fp16"):
        both("l4", tiny_config, 8, quant="fp32")


def test_the_command() -> None:
    words = [sys.executable, "-m", "jaxinfer", "plan", str(DATA / "tiny_llama"), "--gpu", "h100", "--compile"]
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("each GPU")[1].split()[:2] == ["formulas", "compiled"]
    assert "in 1 CUDA graphs, 0 outside; the formulas are off by" in done.stdout
