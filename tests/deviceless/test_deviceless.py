"""The report tells good programs from bad ones, for every GPU model."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.planning.deviceless import compile_for, gpu_target

WEIGHT = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
CACHE = jax.ShapeDtypeStruct((64, 16, 2048), jnp.bfloat16)
ROWS = jax.ShapeDtypeStruct((8, 2048), jnp.bfloat16)
MIB = 1 << 20


def layers(weights: tuple[jax.Array, ...], cache: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A stand-in for a decode step: products with weights, and writes into a cache."""
    for index, weight in enumerate(weights):
        cache = cache.at[jnp.arange(8) + index, 3].set(x)
        x = jnp.tanh(x @ weight) + cache[:8, 3]
    return x, cache


def test_a_step_in_place_is_one_graph(gpu: str) -> None:
    step = jax.jit(layers, donate_argnums=1)
    report = compile_for(gpu_target(gpu), step, (WEIGHT,) * 4, CACHE, ROWS)
    assert report.alias_bytes == 4 * MIB
    assert report.argument_bytes >= 4 * 8 * MIB + 4 * MIB
    assert report.temp_bytes < 4 * MIB
    assert not report.copies_of((WEIGHT, CACHE))
    assert report.num_command_buffers == 1
    assert not report.launches_outside_graphs()
    assert sum("gemm" in launch.name for launch in report.launches) >= 4
    assert "HloModule" in report.hlo


def test_a_cache_that_is_not_donated_shows() -> None:
    report = compile_for(gpu_target("h200"), jax.jit(layers), (WEIGHT,) * 2, CACHE, ROWS)
    assert report.alias_bytes == 0
    assert report.output_bytes > 4 * MIB


def test_copies_of_weights_show() -> None:
    @jax.jit
    def sorted_weights(weights: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = x @ jnp.sort(weight, axis=0)
        return x

    report = compile_for(gpu_target("h200"), sorted_weights, (WEIGHT,) * 2, ROWS)
    assert report.copies_of(WEIGHT)
    assert report.temp_bytes >= 8 * MIB


def test_static_arguments_and_several_gpus() -> None:
    target = gpu_target("h100", num_devices=2)
    split = jax.sharding.NamedSharding(target.mesh, jax.sharding.PartitionSpec("model"))
    weight = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16, sharding=split)

    @partial(jax.jit, static_argnums=2)
    def product(x: jax.Array, weight: jax.Array, power: int) -> jax.Array:
        return (x @ weight) ** power

    report = compile_for(target, product, ROWS, weight, 2)
    assert report.argument_bytes < 5 * MIB  # half of the weight, and the rows
    assert "all-reduce" in report.hlo


def test_the_persistent_cache_is_left_alone() -> None:
    before = jax.config.values["jax_enable_compilation_cache"]
    for _ in range(2):  # the second would be read back, which JAX cannot do for such a program
        compile_for(gpu_target("h200"), jax.jit(jnp.tanh), ROWS)
    assert jax.config.values["jax_enable_compilation_cache"] == before


@pytest.mark.parametrize(("name", "num_devices"), [("tpu-v5e", 1), ("h200", 0)])
def test_bad_targets(name: str, num_devices: int) -> None:
    with pytest.raises(ValueError, match=r"name='tpu-v5e'.*h200|num_devices=0"):
        gpu_target(name, num_devices)
