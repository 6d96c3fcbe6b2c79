"""The public operation: documentation, checks, choice of implementation."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_copy.reference import block_copy_reference
from pallas_kernels.block_copy.triton import block_copy_triton, check_block_copy
from pallas_kernels.byte_pairs import needs_pairs
from pallas_kernels.dispatch import Device, choose


def block_copy(
    pages: jax.Array,
    source_ids: jax.Array,
    target_ids: jax.Array,
    *,
    scales: jax.Array | None = None,
    implementation: str | None = None,
) -> Any:
    """Copies whole pages within a KV pool, in place when the pool is donated: on a GPU one launch.

    Page ``target_ids[c]`` becomes what page ``source_ids[c]`` is, with its scales. All pairs are copied at once: no
    page may be a target twice, and none both a source and a target, or what it ends up with is undefined. Pairs (0, 0)
    are padding and may repeat.

    Args:
        pages: [P, ...], any dtype; ``[P, 2K, S, H]`` of a layer.
        source_ids, target_ids: int32[C], 0 .. P - 1.
        scales: [P, ...], of a quantised pool.
        implementation: one of `pallas_kernels.dispatch.IMPLEMENTATIONS`; None chooses for the current device.

    Returns:
        pages, or (pages, scales) if scales were given.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or an unknown implementation.
    """
    if source_ids.ndim != 1 or source_ids.shape != target_ids.shape:
        raise ValueError(f"source_ids{source_ids.shape} and target_ids{target_ids.shape} must both be [C]")
    for field, ids in (("source_ids", source_ids), ("target_ids", target_ids)):
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"{field} is {ids.dtype}; it must be int32: use .astype(jnp.int32)")
    if pages.ndim < 2 or (scales is not None and (scales.ndim < 2 or scales.shape[0] != pages.shape[0])):
        given = "" if scales is None else f" and scales{scales.shape}"
        raise ValueError(f"pages{pages.shape}{given} must be [P, ...] with the same P")
    name = choose(
        "block_copy",
        implementation,
        check=partial(_check_support, pages),
        self_check=_check_block_copy,
        case=(str(pages.dtype), scales is not None, needs_pairs(pages.shape, pages.dtype)),
    )
    if name.startswith("triton") and source_ids.shape[0]:
        interpret = name == "triton-interpret"
        return block_copy_triton(pages, source_ids, target_ids, scales=scales, interpret=interpret)
    return block_copy_reference(pages, source_ids, target_ids, scales=scales)


def _check_support(pages: jax.Array, device: Device) -> None:
    del device  # moving bytes works on all of them
    check_block_copy(pages)


def _check_block_copy(implementation: str, dtype: str, with_scales: bool, paired: bool = False) -> Any:
    """Pages of more than one stretch, so that the last one is cut short."""
    pages = jnp.asarray(np.random.default_rng(0).integers(0, 8, (4, 2, 16, 300)), dtype)
    scales = jnp.arange(128, dtype=jnp.float32).reshape(4, 2, 16) if with_scales else None
    ids = jnp.array([1, 0, 2]), jnp.array([3, 0, 0])
    run: Any = partial(block_copy, implementation=implementation)
    if paired and implementation.startswith("triton"):
        run = partial(block_copy_triton, paired=True, interpret=implementation != "triton")
    copied = run(pages, *ids, scales=scales)
    pages, *rest = copied if with_scales else (copied,)
    return pages.astype(jnp.float32), *rest
