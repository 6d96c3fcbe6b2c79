"""The deterministic step, compiled for GPUs that are not here."""

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.cache.paged import kv_cache_shapes
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes
from jaxinfer.planning.deviceless import compile_for, compiling_for, gpu_target
from jaxinfer.runner.fixed_tiles import tile_tokens
from jaxinfer.runner.inputs import StepSpec, packed_size
from jaxinfer.runner.programs import TILED_GPU_OPTIONS, gpu_options
from jaxinfer.runner.tiled_step import make_tiled_step
from jaxinfer.sampling.state import init_state

CONFIG = ModelConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=2,
    num_attention_heads=16,
    num_key_value_heads=4,
    max_position_embeddings=4096,
)


@pytest.mark.parametrize("gpu", ["a100-80g", "h200"])
def test_loops_over_tiles_copy_nothing(gpu: str) -> None:
    """What a loop carries stays in place: the pool is not copied from tile to tile, nor are weights into it."""
    tile = tile_tokens("gpu")
    spec = StepSpec(num_tokens=4 * tile, num_rows=64, table_width=64, sampler=False, num_logits=tile, tile=tile)
    target = gpu_target(gpu, 1)
    params, kv = param_shapes(CONFIG, jnp.bfloat16), kv_cache_shapes(CONFIG, 4096, 16, "bfloat16")
    state = jax.eval_shape(lambda: init_state(64, CONFIG.vocab_size))
    leaves, tree = jax.tree.flatten(params)
    step = make_tiled_step(CONFIG, tree, spec, block_size=16, num_logprobs=5)
    packed = jax.ShapeDtypeStruct((packed_size(spec),), jnp.int32)
    with compiling_for(target):
        options = gpu_options(params) | dict(TILED_GPU_OPTIONS)
    jitted = jax.jit(step, donate_argnums=(1, 2))
    report = compile_for(target, jitted, tuple(leaves), kv, state, packed, compiler_options=options)
    assert report.copies_of((params, kv)) == ()
    assert report.alias_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((kv, state)))
    names = [launch.name for launch in report.launches]
    assert sum(name.startswith("paged_attention_short") for name in names) == CONFIG.num_hidden_layers
    assert {launch.kind for launch in report.launches_outside_graphs()} == {"CustomKernel"}  # the loops' conditions
    assert len(report.launches_outside_graphs()) == 2
