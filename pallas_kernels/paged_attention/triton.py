"""Ragged paged attention on Pallas's Triton backend: NVIDIA GPUs from Ampere on, or interpreted anywhere.

A decode step is two launches: one kernel over the pieces of all tiles, and one that merges tiles of several pieces. A
step with longer rows has a launch more, over tiles of more rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.byte_pairs import as_pairs, needs_pairs
from pallas_kernels.dispatch import Device, current_device
from pallas_kernels.kv_format import format_of, head_dim_of
from pallas_kernels.paged_attention.config import HOPPER, TileConfig, split_policy, tile_config
from pallas_kernels.paged_attention.split_plan import (
    UNIT,
    ListPolicy,
    SplitPlan,
    SplitPolicy,
    TileList,
    make_split_plan,
)
from pallas_kernels.paged_attention.triton_kernel import KernelSpec, MergeSpec, attend_kernel, merge_kernel
from pallas_kernels.triton_call import triton_call

MAX_GROUP = 16

WHOLE = 1 << 30
"""A piece longer than any context."""


def check_triton(
    device: Device,
    *,
    num_heads: int,
    num_kv_heads: int,
    pages_shape: tuple[int, ...],
    pages_dtype: Any,
    dtype: Any = None,
) -> None:
    """Tells what the kernel cannot do.

    Args:
        device: what is compiled for.
        num_heads, num_kv_heads: N, K.
        pages_shape, pages_dtype: of the pool.
        dtype: of the queries, if it is known.

    Raises:
        NotImplementedError: what it is, and what to use instead.
    """
    if device.compute_capability is not None and device.compute_capability < (8, 0):
        major, minor = device.compute_capability
        raise NotImplementedError(
            f"{device.kind} has compute capability {major}.{minor}, and the Triton kernel needs 8.0; use "
            "implementation='xla'"
        )
    _check_group(num_heads, num_kv_heads)
    head_dim = head_dim_of(jax.ShapeDtypeStruct(pages_shape, pages_dtype))
    if jnp.float32 in (dtype, pages_dtype) and head_dim > 128 and device.compute_capability not in HOPPER:
        raise NotImplementedError(
            f"float32 with head_dim={head_dim} takes more shared memory than {device.kind} has; use bfloat16 or "
            "float16, or implementation='xla'"
        )
    if needs_pairs(pages_shape, pages_dtype) and pages_shape[-1] % 2:
        raise NotImplementedError(
            f"pages{tuple(pages_shape)} of {jnp.dtype(pages_dtype)}, between 2 and 4 GiB, need an even last axis in "
            "the Triton kernel; use another number of pages, or implementation='xla'"
        )


def _check_group(num_heads: int, num_kv_heads: int) -> None:
    if num_heads > MAX_GROUP * num_kv_heads:
        raise NotImplementedError(
            f"{num_heads} query heads on {num_kv_heads} KV heads: the Triton kernel takes at most {MAX_GROUP} a KV "
            "head; use implementation='xla'"
        )


def make_work_list_triton(
    query_start: jax.Array,
    context_lens: jax.Array,
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None = None,
    whole: bool = False,
) -> SplitPlan:
    """The step's plan for `paged_attention_triton`; see `make_split_plan` for the arguments. With `whole` it cuts no
    tile's context.

    Raises:
        NotImplementedError: more query heads a KV head than a tile has rows.
    """
    _check_group(num_heads, num_kv_heads)
    group = num_heads // num_kv_heads
    policy = split_policy(
        current_device(),
        num_tokens=num_tokens,
        num_rows=context_lens.shape[0],
        group=group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    if whole:
        policy = SplitPolicy(ListPolicy(policy.short.block_m, 1, WHOLE), None)
    return make_split_plan(query_start, context_lens, num_tokens=num_tokens, group=group, window=window, policy=policy)


def paged_attention_triton(
    q: jax.Array,
    pages: jax.Array,
    block_tables: jax.Array,
    query_start: jax.Array,
    context_lens: jax.Array,
    *,
    scales: jax.Array | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    tree_mask: jax.Array | None,
    work_list: SplitPlan,
    interpret: bool = False,
) -> jax.Array:
    """Same contract as `paged_attention`, with the plan of `make_work_list_triton` for the same step and window.

    Raises:
        NotImplementedError: as `check_triton`.
    """
    num_heads, num_kv_heads = q.shape[1], pages.shape[1] // 2
    device = current_device()
    if not interpret:
        check_triton(
            device,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            pages_shape=pages.shape,
            pages_dtype=pages.dtype,
            dtype=q.dtype,
        )
    kv_format = format_of(pages.dtype)
    spec = KernelSpec(
        block_m=0,
        parts=1,
        block_kv=0,
        group=num_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim_of(pages),
        page_size=pages.shape[2],
        pages_dtype=pages.dtype,
        packed=kv_format is not None and kv_format.packed,
        quantized=kv_format is not None,
        paired=needs_pairs(pages.shape, pages.dtype),
        as_bytes=_is_padded_float8(pages),
        scale=scale,
        window=window,
        softcap=softcap,
        tree=tree_mask is not None,
        edges=tree_mask is not None,
        num_aliased=0,
        precision=_precision(q.dtype, interpret),
        interpret=interpret,
    )
    operands = [q, _as_loaded(spec, pages), block_tables]
    if kv_format is not None:
        assert scales is not None
        operands.append(scales)
    if tree_mask is not None:
        operands += [tree_mask, query_start, context_lens]
    carried: tuple[jax.Array, ...] = ()
    for name, tiles in (("long", work_list.long), ("short", work_list.short)):
        if tiles is not None:
            config = tile_config(
                device,
                block_m=tiles.block_m,
                group=spec.group,
                head_dim=spec.head_dim,
                dtype=q.dtype,
                pages_dtype=pages.dtype,
                tree=spec.tree,
            )
            carried = _attend(spec, config, name, tiles, work_list.num_units, operands, carried, interpret)
    return _merge(spec, work_list, carried, interpret)


def _attend(
    spec: KernelSpec,
    config: TileConfig,
    name: str,
    tiles: TileList,
    num_units: int,
    operands: list[jax.Array],
    carried: tuple[jax.Array, ...],
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """One list of tiles: (out, partial results, their log-sum-exps), written into `carried` where there is one."""
    parts = tiles.block_m // config.block_m
    spec = spec.for_tiles(config.block_m, parts, config.block_kv, config.edges, len(carried))
    q = operands[0]
    results = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((num_units, spec.num_kv_heads, UNIT, spec.channels), jnp.float32),
        jax.ShapeDtypeStruct((num_units, spec.num_kv_heads, UNIT), jnp.float32),
    )
    first = 1 + len(operands)
    return triton_call(
        functools.partial(attend_kernel, spec),
        name=f"paged_attention_{name}",
        out_shape=results,
        grid=(tiles.items.shape[0] * parts * spec.num_kv_heads,),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        input_output_aliases={first + index: index for index in range(len(carried))},
    )(tiles.items, *operands, *carried)


def _merge(spec: KernelSpec, plan: SplitPlan, carried: tuple[jax.Array, ...], interpret: bool) -> jax.Array:
    """What the attention kernels wrote, with the results of tiles of several pieces put in."""
    out, partial, lse = carried
    merge = MergeSpec(
        rows=plan.merge_rows,
        group=spec.group,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        channels=spec.channels,
        block=32,
    )
    return triton_call(
        functools.partial(merge_kernel, merge),
        name="paged_attention_merge",
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        grid=(plan.merges.shape[0] * merge.num_kv_heads * merge.rows,),
        num_warps=4,
        interpret=interpret,
        input_output_aliases={3: 0},
    )(plan.merges, partial, lse, out)


def _precision(dtype: Any, interpret: bool) -> Any:
    """Float32 products keep float32's precision, on tensor cores; XLA's CPU backend knows no such algorithm."""
    if dtype != jnp.float32:
        return lax.Precision.DEFAULT
    return lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3


def _as_loaded(spec: KernelSpec, pages: jax.Array) -> jax.Array:
    """The pool's memory in the type that the kernel loads."""
    if spec.paired:
        return as_pairs(pages)
    return lax.bitcast_convert_type(pages, jnp.int8) if spec.as_bytes else pages


def _is_padded_float8(pages: jax.Array) -> bool:
    """Whether float8 elements must be loaded as bytes: what stands in for channels that pad H to a power of two is an
    integer to Pallas, which it cannot turn into a float8."""
    padded = pages.shape[-1] & (pages.shape[-1] - 1) != 0
    return (
        padded
        and jnp.issubdtype(pages.dtype, jnp.floating)
        and pages.dtype.itemsize == 1
        and not needs_pairs(pages.shape, pages.dtype)
    )
