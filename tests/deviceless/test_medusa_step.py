"""Medusa heads of an 8B model, compiled for GPUs that are not here."""

import jax
import jax.numpy as jnp

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes
from jaxinfer.models.medusa import MedusaConfig, medusa_shapes
from jaxinfer.planning.deviceless import compile_for, compiling_for, gpu_target
from jaxinfer.runner.medusa_step import make_medusa_step
from jaxinfer.runner.programs import gpu_options
from jaxinfer.sharding.placement import Placement
from jaxinfer.sharding.shards import shards_of

MODEL = ModelConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, num_attention_heads=32,
    num_key_value_heads=8,
)  # fmt: skip


def test_heads_are_one_graph_that_copies_nothing(gpu: str) -> None:
    heads = MedusaConfig(4096, 128256, 4)
    params = medusa_shapes(heads, jnp.bfloat16)
    tokens = {name: leaf for name, leaf in param_shapes(MODEL, jnp.bfloat16).items() if name in ("embed", "lm_head")}
    leaves, tree = jax.tree.flatten(params)
    token_leaves, token_tree = jax.tree.flatten(tokens)
    features = jax.ShapeDtypeStruct((4096, 1, 16, 4096), jnp.bfloat16)
    places = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    step = make_medusa_step(shards_of(MODEL, Placement()), heads, tree, token_tree, 10)
    target = gpu_target(gpu)
    with compiling_for(target):
        options = gpu_options(tokens)
    arguments = (tuple(leaves), tuple(token_leaves), features, places)
    report = compile_for(target, jax.jit(step), *arguments, compiler_options=options)
    assert report.launches_outside_graphs() == () and report.num_command_buffers == 1
    assert report.copies_of(arguments) == ()
    # Logits of four heads of eight rows, some of them several times.
    assert report.temp_bytes < 8 * 4 * 8 * 128256 * 4
