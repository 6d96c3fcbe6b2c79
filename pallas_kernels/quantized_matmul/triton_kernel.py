"""The kernel for Pallas's Triton backend: one tile of the result, over one piece of the channels.

For few tokens the codes themselves meet x on the tensor cores, exactly, and the scale meets the sum of a group; what
the offset adds is the sum of x over the group times it (`few_tokens`). For many tokens weights are made of the codes
first, once for all the rows of a tile.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.quantized_matmul.code_ptx import fused_multiply_add, load_table
from pallas_kernels.quantized_matmul.config import FEW_TOKENS
from pallas_kernels.quantized_matmul.few_tokens import scale_sums
from pallas_kernels.quantized_matmul.kernel_spec import KernelSpec, Place, Refs, decoded, factors, load_x, refs_of

SWIZZLE = 16
"""Tiles of tokens that share the weights' rows before the next rows come, so that both stay in the L2 cache."""


def multiply_kernel(spec: KernelSpec, *operands: Any) -> None:
    """Operands as in `triton.py`; the last are the result [splits, M, N] and, if asked for, maxima [tiles, M]."""
    refs = refs_of(spec, operands)
    table = load_table(refs.codebook, spec.dtype, spec.interpret) if spec.has_table else None
    tiles = spec.tiles
    token_tile, out_tile = _tile_of(spec, pl.program_id(0))
    tokens = token_tile * tiles.tokens + jnp.arange(tiles.tokens)
    outs = out_tile * tiles.out + jnp.arange(tiles.out)
    place = Place(jnp.minimum(tokens, spec.num_tokens - 1), jnp.minimum(outs, spec.num_out - 1), out_tile * tiles.out)
    first = pl.program_id(1) * tiles.steps
    last = jnp.minimum(first + tiles.steps, spec.steps)
    multiply = scale_sums if tiles.tokens <= FEW_TOKENS else _scale_weights
    result = multiply(spec, refs, place, table, first, last).astype(refs.out.dtype)
    target = refs.out.at[pl.program_id(1), tokens[:, None], outs[None, :]]
    mask = (tokens < spec.num_tokens)[:, None] & (outs < spec.num_out)[None, :]
    plt.store(target, result, mask=mask)
    if spec.gives_maxima:
        # Columns past the last are that one again. What is not finite counts as infinite.
        sizes = jnp.abs(result.astype(jnp.float32))
        maxima = jnp.max(jnp.where(sizes < jnp.inf, sizes, jnp.inf), axis=1)
        plt.store(refs.out_maxima.at[out_tile, tokens], maxima, mask=tokens < spec.num_tokens)


def _tile_of(spec: KernelSpec, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tiles along M and N of a program."""
    if spec.token_tiles == 1:
        return jnp.int32(0), index
    per_band = SWIZZLE * spec.out_tiles
    band, within = lax.div(index, per_band), lax.rem(index, per_band)
    height = jnp.minimum(spec.token_tiles - band * SWIZZLE, SWIZZLE)
    return band * SWIZZLE + lax.rem(within, height), lax.div(within, height)


def _scale_weights(
    spec: KernelSpec, refs: Refs, place: Place, table: Any, first: jax.Array, last: jax.Array
) -> jax.Array:
    """float32[tokens, out]: weights meet x."""
    scale_later = not spec.grouped and not spec.shifted

    def step(index: jax.Array, total: jax.Array) -> jax.Array:
        x = load_x(spec, refs, place, index)
        weights = decoded(spec, refs, place, table, index)
        if not scale_later:
            scale, shift = factors(spec, refs, place, index)
            wide = weights.astype(jnp.float32)
            wide = fused_multiply_add(wide, scale[:, None], shift[:, None], spec.interpret)
            weights = wide.astype(spec.dtype)
        return total + (plt.dot(weights, x, trans_b=True) if spec.weights_first else plt.dot(x, weights, trans_b=True))

    shape = spec.tiles.tokens, spec.tiles.out
    zero = jnp.zeros(shape[::-1] if spec.weights_first else shape, jnp.float32)
    total = lax.fori_loop(first, last, step, zero)
    total = total.T if spec.weights_first else total
    return total * factors(spec, refs, place, first)[0][None, :] if scale_later else total
