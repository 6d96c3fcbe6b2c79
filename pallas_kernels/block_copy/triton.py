"""The page copy as one Pallas-Triton launch: a program moves one stretch of one page, and its share of the scales."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.byte_pairs import as_pairs, from_pairs, needs_pairs
from pallas_kernels.triton_call import triton_call

STRETCH_BYTES = 8192
"""Of a page that a program copies: 4 warps with four 16-byte accesses a lane."""

NUM_WARPS = 4


def block_copy_triton(
    pages: jax.Array,
    source_ids: jax.Array,
    target_ids: jax.Array,
    *,
    scales: jax.Array | None = None,
    interpret: bool = False,
    paired: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Same contract as `block_copy`; `paired` copies any pool of bytes as those of 2 to 4 GiB have to be.

    Raises:
        NotImplementedError: a pool that the kernel cannot address.
    """
    check_block_copy(pages)
    pool = (pages,) if scales is None else (pages, scales)
    flat = [array.reshape(array.shape[0], -1) for array in pool]
    paired |= needs_pairs(pages.shape, pages.dtype)
    if paired:
        flat[0] = as_pairs(flat[0])
    num_stretches = pl.cdiv(flat[0].shape[1] * flat[0].dtype.itemsize, STRETCH_BYTES)
    stretches = tuple(pl.next_power_of_2(pl.cdiv(array.shape[1], num_stretches)) for array in flat)
    copied = triton_call(
        partial(_kernel, stretches=stretches),
        name="block_copy",
        out_shape=tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in flat),
        grid=(source_ids.shape[0], num_stretches),
        num_warps=NUM_WARPS,
        input_output_aliases={2 + index: index for index in range(len(flat))},
        interpret=interpret,
    )(source_ids, target_ids, *flat)
    new_pages, *new_scales = copied
    new_pages = (from_pairs(new_pages, pages.dtype) if paired else new_pages).reshape(pages.shape)
    return new_pages if scales is None else (new_pages, new_scales[0].reshape(scales.shape))


def check_block_copy(pages: jax.Array) -> None:
    """Raises NotImplementedError for a pool that the kernel cannot address."""
    if needs_pairs(pages.shape, pages.dtype) and math.prod(pages.shape[1:]) % 2:
        raise NotImplementedError(
            f"{pages.dtype}{pages.shape} has between 2 and 4 GiB of 8-bit elements, which are copied in pairs, and an "
            "odd number of them in a page; take fewer or more pages"
        )


def _kernel(source_ids_ref: Any, target_ids_ref: Any, *pool_refs: Any, stretches: tuple[int, ...]) -> None:
    pair, place = pl.program_id(0), pl.program_id(1)
    source, target = source_ids_ref[pair], target_ids_ref[pair]

    @pl.when(source != target)
    def _copy() -> None:
        # Results alone are read and written: the operands they alias are copies of them where kernels are interpreted.
        for ref, stretch in zip(pool_refs[len(stretches) :], stretches, strict=True):
            elements = place * stretch + jnp.arange(stretch)
            exists = elements < ref.shape[1]
            values = plt.load(ref.at[source, elements], mask=exists, other=jnp.zeros((), ref.dtype))
            plt.store(ref.at[target, elements], values, mask=exists)
