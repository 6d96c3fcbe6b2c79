"""KV write and page copy, compiled to the end for GPUs that are not here: one launch, pool and scales in place."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.planning.deviceless import compile_for, gpu_target
from pallas_kernels.block_copy import block_copy
from pallas_kernels.kv_write import kv_write, rope_kv_write

INDEX = jax.ShapeDtypeStruct((32,), jnp.int32)


class Pool(NamedTuple):
    pages: jax.ShapeDtypeStruct
    scales: jax.ShapeDtypeStruct | None

    @property
    def nbytes(self) -> int:
        return sum(array.size * array.dtype.itemsize for array in self if array is not None)


def pool(dtype: Any, heads: int, head_dim: int, pages: int = 1024, page_size: int = 16) -> Pool:
    width = head_dim // 2 if dtype == jnp.uint8 else head_dim
    shape = (pages, 2 * heads, page_size, width)
    scales = None if dtype in (jnp.bfloat16, jnp.float16) else jax.ShapeDtypeStruct(shape[:3], jnp.float32)
    return Pool(jax.ShapeDtypeStruct(shape, dtype), scales)


def rope(heads: int, groups: int, head_dim: int, rotary_dim: int, tokens: int = 32) -> tuple[Any, ...]:
    qkv = jax.ShapeDtypeStruct((tokens, heads, groups + 2, head_dim), jnp.bfloat16)
    angles = jax.ShapeDtypeStruct((tokens, rotary_dim // 2), jnp.float32)
    return qkv, angles, angles


def in_place(function: Callable[..., Any]) -> Any:
    """`function(*operands, pages, *places, scales=)` jitted over (operands, pool, *places), the pool donated."""

    def run(operands: tuple[jax.Array, ...], given: Pool, *places: jax.Array) -> Any:
        return function(*operands, given.pages, *places, scales=given.scales)

    return jax.jit(run, donate_argnums=1)


def assert_one_launch(report: Any, name: str, given: Pool) -> None:
    assert [launch.name for launch in report.launches] == [name]
    assert report.alias_bytes == given.nbytes
    assert report.temp_bytes < 1024


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.float8_e5m2, jnp.float8_e4m3fn, jnp.uint8])
def test_rope_and_write_are_one_launch_in_place(gpu: str, dtype: Any) -> None:
    if dtype == jnp.float8_e4m3fn and gpu.startswith("a100"):
        pytest.skip("Ampere cannot convert to e4m3; another test looks at what runs there")
    given = pool(dtype, 8, 128)
    report = compile_for(gpu_target(gpu), in_place(rope_kv_write), rope(8, 4, 128, 128), given, INDEX, INDEX)
    assert_one_launch(report, "rope_kv_write", given)


@pytest.mark.parametrize(
    ("heads", "groups", "head_dim", "rotary_dim", "dtype"),
    [
        (32, 1, 64, 64, jnp.float16),
        (32, 1, 80, 32, jnp.uint8),
        (2, 7, 96, 96, jnp.int8),
        (1, 16, 256, 64, jnp.bfloat16),
        (1, 71, 64, 64, jnp.float8_e4m3fn),
    ],
)
def test_other_shapes_too(heads: int, groups: int, head_dim: int, rotary_dim: int, dtype: Any) -> None:
    given = pool(dtype, heads, head_dim, page_size=64)
    operands = rope(heads, groups, head_dim, rotary_dim)
    report = compile_for(gpu_target("h200"), in_place(rope_kv_write), operands, given, INDEX, INDEX)
    assert_one_launch(report, "rope_kv_write", given)


def test_a_pool_beyond_32_bit_offsets_is_written_in_place() -> None:
    given = pool(jnp.bfloat16, 8, 128, pages=1 << 18)
    assert given.nbytes > 1 << 32
    report = compile_for(gpu_target("h200"), in_place(rope_kv_write), rope(8, 4, 128, 128), given, INDEX, INDEX)
    assert_one_launch(report, "rope_kv_write", given)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.uint8])
def test_a_pool_that_is_addressed_in_pairs_of_bytes_is_written_and_copied_in_place(dtype: Any) -> None:
    given = pool(dtype, 8, 128, pages=(3 << 30) // (256 * (64 if dtype == jnp.uint8 else 128)))
    assert 1 << 31 < given.pages.size < 1 << 32
    report = compile_for(gpu_target("h200"), in_place(rope_kv_write), rope(8, 4, 128, 128), given, INDEX, INDEX)
    assert_one_launch(report, "rope_kv_write", given)
    report = compile_for(gpu_target("h200"), in_place(block_copy), (), given, INDEX, INDEX)
    assert_one_launch(report, "block_copy", given)


def test_ampere_writes_e4m3_through_xla_in_place() -> None:
    given = pool(jnp.float8_e4m3fn, 8, 128)
    report = compile_for(gpu_target("a100-80g"), in_place(rope_kv_write), rope(8, 4, 128, 128), given, INDEX, INDEX)
    assert "rope_kv_write" not in [launch.name for launch in report.launches]
    assert report.alias_bytes == given.nbytes
    assert report.copies_of((given.pages, given.scales)) == ()
    explicit = in_place(partial(rope_kv_write, implementation="triton"))
    with pytest.raises(NotImplementedError, match=r"float8_e4m3fn pages on NVIDIA A100.*8\.9 is needed"):
        compile_for(gpu_target("a100-80g"), explicit, rope(8, 4, 128, 128), given, INDEX, INDEX)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.float8_e5m2, jnp.float8_e4m3fn, jnp.uint8])
def test_the_write_alone_is_one_launch_in_place(dtype: Any) -> None:
    given, rows = pool(dtype, 8, 128), jax.ShapeDtypeStruct((32, 8, 128), jnp.bfloat16)
    report = compile_for(gpu_target("h200"), in_place(kv_write), (rows, rows), given, INDEX, INDEX)
    assert_one_launch(report, "kv_write", given)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn])
def test_a_page_copy_is_one_launch_in_place(gpu: str, dtype: Any) -> None:
    given = pool(dtype, 8, 128)
    report = compile_for(gpu_target(gpu), in_place(block_copy), (), given, INDEX, INDEX)
    assert_one_launch(report, "block_copy", given)


def test_two_gpus_write_their_heads_in_place() -> None:
    target = gpu_target("h100", num_devices=2)
    heads, whole = PartitionSpec(None, "model"), PartitionSpec()
    local = in_place(rope_kv_write)
    specs = ((heads, whole, whole), Pool(heads, heads), whole, whole)
    step = jax.shard_map(
        local, mesh=target.mesh, in_specs=specs, out_specs=(PartitionSpec(None, "model"), heads, heads), check_vma=False
    )
    qkv, cos, sin = rope(8, 4, 128, 128)
    given = pool(jnp.int8, 8, 128)
    split = NamedSharding(target.mesh, heads)
    qkv, *arrays = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for x in (qkv, *given))
    report = compile_for(target, jax.jit(step, donate_argnums=1), (qkv, cos, sin), Pool(*arrays), INDEX, INDEX)
    assert_one_launch(report, "rope_kv_write", given._replace(pages=_half(given.pages), scales=_half(given.scales)))


def _half(array: Any) -> jax.ShapeDtypeStruct:
    """What one of two devices holds."""
    return jax.ShapeDtypeStruct((array.shape[0], array.shape[1] // 2, *array.shape[2:]), array.dtype)
