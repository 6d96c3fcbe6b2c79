"""Steps that verify 5 guesses for each of 16 requests, and EAGLE's draft loop, compiled for GPUs that are not here.

Every layer is the same program again: two show what there is to see.
"""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxinfer.config import EagleTree
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eagle import eagle_config
from jaxinfer.models.eagle3 import eagle3_config
from jaxinfer.models.eagle_model import EagleModel
from jaxinfer.planning.deviceless import gpu_target
from jaxinfer.runner.deviceless_eagle import DevicelessLoop, compile_eagle_loop, eagle_features, eagle_shapes
from jaxinfer.runner.deviceless_step import DevicelessStep, compile_step
from jaxinfer.runner.eagle_step import EagleHead
from jaxinfer.runner.inputs import StepSpec

MIB = 1 << 20
REQUESTS, GUESSES = 16, 5
LLAMA_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=2,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_theta=5e5,
)
TOKENS = REQUESTS * (1 + GUESSES)
CHAINS = StepSpec(TOKENS, REQUESTS, table_width=512, sampler=False, num_logits=TOKENS)
TREES = replace(CHAINS, tree_width=1 + GUESSES)
LOGITS = 4 * TOKENS * LLAMA_8B.vocab_size
EAGLE = EagleModel(LLAMA_8B, eagle_config(LLAMA_8B), True)
EAGLE3 = EagleModel(LLAMA_8B, eagle3_config(LLAMA_8B, 32000, (0, 1, 2)))


def assert_one_graph_in_place(compiled: DevicelessStep | DevicelessLoop) -> None:
    """All launches in one CUDA graph, the pool updated where it is, nothing made that is as large as a weight or it."""
    report = compiled.report
    assert report.num_command_buffers == 1 and report.launches_outside_graphs() == ()
    assert report.copies_of((compiled.params, compiled.kv)) == ()
    assert report.alias_bytes == compiled.donated_bytes
    assert {kernel.spill_bytes for kernel in report.kernels} == {0}


@pytest.mark.parametrize("gpu", ["a100-80g", "h200"])
def test_verifying_chains(gpu: str) -> None:
    step = compile_step(gpu_target(gpu), LLAMA_8B, CHAINS)
    assert_one_graph_in_place(step)
    assert step.report.temp_bytes < 2 * LOGITS + 32 * MIB


@pytest.mark.parametrize(
    ("gpu", "model"),
    [("a100-80g", EAGLE), ("rtx4090", EAGLE), ("h100", EAGLE3), ("h200", EAGLE)],
)
def test_verifying_trees_and_keeping_up_a_head(gpu: str, model: EagleModel) -> None:
    tree = EagleTree(model.layer, 3, 3, GUESSES)
    features = eagle_features(model, tree, REQUESTS, 16, jnp.bfloat16)
    head = EagleHead(model, eagle_shapes(model))
    step = compile_step(gpu_target(gpu), LLAMA_8B, TREES, features=features, eagle=head)
    assert_one_graph_in_place(step)
    assert step.report.temp_bytes < 2 * LOGITS + 32 * MIB
    names = [launch.name for launch in step.report.launches]
    assert sum(name.startswith("rope_kv_write") for name in names) == LLAMA_8B.num_hidden_layers + 1


LOOPS = {"chain": (EAGLE, (5, 1), 32000), "tree": (EAGLE, (3, 3), 0), "eagle3": (EAGLE3, (3, 3), 0)}


@pytest.mark.parametrize(
    ("gpu", "name"),
    [("a100-80g", "tree"), ("rtx4090", "chain"), ("h100", "eagle3"), ("h200", "tree")],
)
def test_a_draft_loop(gpu: str, name: str) -> None:
    model, (depth, top_k), guessed = LOOPS[name]
    tree = EagleTree(model.layer, depth, top_k, GUESSES)
    loop = compile_eagle_loop(gpu_target(gpu), model, tree, num_rows=REQUESTS, table_width=512, num_guessed=guessed)
    assert_one_graph_in_place(loop)
    among = guessed or (32000 if model is EAGLE3 else LLAMA_8B.vocab_size)
    assert loop.report.temp_bytes < 2 * 4 * REQUESTS * top_k * among + 32 * MIB
    heads = sum(launch.name.startswith("rope_kv_write") for launch in loop.report.launches)
    assert heads == depth
