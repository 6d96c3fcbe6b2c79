"""A decode step of 32 rows of each family's 8B-size model, cut to four layers, compiled for an absent H200."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.registry import FAMILIES, family_of_hf_config
from jaxinfer.planning.deviceless import gpu_target
from jaxinfer.runner.deviceless_step import DevicelessStep, compile_step
from jaxinfer.runner.inputs import StepSpec

MIB = 1 << 20
LAYERS = 4
DECODE = StepSpec(num_tokens=32, num_rows=32, table_width=512, sampler=False)
SIZES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent.parent / "data/published_sizes.json").read_text())
# Model -> the most launches that a layer may take.
LAUNCHES = {
    "Llama-3-8B": 8,
    "Mistral-7B": 8,
    "Mixtral-8x7B": 13,
    "Qwen2.5-7B": 11,
    "Qwen3-8B": 12,
    "Qwen1.5-MoE-A2.7B": 23,
    "Qwen3-30B-A3B": 18,
    "Gemma-7B": 10,
    "Gemma-2-9B": 11,
    "Gemma-3-12B": 16,
    "Phi-4": 8,
    "SmolLM3-3B": 10,
    "Granite-3.1-8B": 9,
    "OLMo-2-7B": 13,
    "Command-R": 10,
    "Command-R7B": 12,
    "StableLM-2-12B": 15,
    "GPT-2-XL": 13,
    "Pythia-6.9B": 15,
}


def full_config(name: str) -> dict[str, Any]:
    return {"architectures": [SIZES[name]["architecture"]], **SIZES[name]["config"]}


def four_layers(name: str) -> ModelConfig:
    """The first four layers in a row among which every kind is that the model has."""
    config = full_config(name)
    model = family_of_hf_config(config).model_config(config)
    kinds = model.layer_kinds
    starts = range(len(kinds) - LAYERS + 1)
    start = next(start for start in starts if set(kinds[start : start + LAYERS]) == set(kinds))
    flags = {field: getattr(model, field) for field in ("window_layers", "rope_layers", "moe_layers")}
    cut = {field: flag[start : start + LAYERS] for field, flag in flags.items() if flag is not None}
    return replace(model, num_hidden_layers=LAYERS, **cut)


@pytest.fixture(scope="module")
def steps() -> Iterator[dict[str, Future[DevicelessStep]]]:
    """All models' steps, two compiled at a time."""
    target = gpu_target("h200")
    enabled = jax.config.values["jax_enable_compilation_cache"]
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(compile_step, target, four_layers(name), DECODE) for name in LAUNCHES}
    jax.config.update("jax_enable_compilation_cache", enabled)  # each compilation puts back what it found


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_decode_step(name: str, steps: dict[str, Future[DevicelessStep]]) -> None:
    """One CUDA graph of few launches that updates its pool in place and copies no weights."""
    step, config = steps[name].result(), four_layers(name)
    report, launches = step.report, max(len(layer) for layer in step.layers())
    print(
        f"{name:18} {launches:2} launches a layer, {len(report.launches):3} in all, "
        f"{report.temp_bytes / MIB:6.1f} MiB scratch, compiled in {report.compile_seconds:4.1f} s"
    )
    assert launches <= LAUNCHES[name]
    assert report.launches_outside_graphs() == ()
    assert report.num_command_buffers == 1
    assert report.alias_bytes == step.donated_bytes
    assert report.copies_of((step.params, step.kv)) == ()
    assert [kernel.name for kernel in report.kernels if kernel.spill_bytes] == []
    logits = 4 * DECODE.num_rows * config.vocab_size if config.logit_softcap is not None else 0  # capped, in float32
    assert report.temp_bytes < 32 * MIB + logits


def test_few_rows_are_not_padded() -> None:
    """Nor a head of odd height (GPT-2, above): XLA would pad both for cuBLAS, seven launches a layer."""
    four = replace(DECODE, num_tokens=4, num_rows=4)
    step = compile_step(gpu_target("h200"), replace(four_layers("Llama-3-8B"), num_hidden_layers=2), four)
    (layer,) = step.layers()
    assert len(layer) <= LAUNCHES["Llama-3-8B"]
    assert [launch.name for launch in step.report.launches if "pad" in launch.name] == []


def test_every_family_is_here() -> None:
    assert {family_of_hf_config(full_config(name)).name for name in LAUNCHES} == {family.name for family in FAMILIES}
