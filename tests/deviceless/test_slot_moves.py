"""The program that moves tokens of trees to their places, for a GPU that is not here: in place, and one graph."""

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.cache.paged import kv_cache_shapes, move_slots
from jaxinfer.config import FeatureSpec
from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.deviceless import compile_for, gpu_target
from jaxinfer.runner.slot_moves import MOVES_A_CALL


@pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
def test_moves_copy_no_pool(dtype: str) -> None:
    model = ModelConfig(1000, 1024, 1024, 2, 8, 8, head_dim=128)
    kv = kv_cache_shapes(model, 4096, 16, dtype, FeatureSpec("hidden", 1024, "bfloat16"))
    slots = jax.ShapeDtypeStruct((2, MOVES_A_CALL), jnp.int32)
    report = compile_for(gpu_target("h200"), jax.jit(move_slots, donate_argnums=0), kv, slots)
    assert report.num_command_buffers == 1 and not report.launches_outside_graphs()
    assert report.temp_bytes < 1 << 20  # a layer's pool has 64 MiB and more
