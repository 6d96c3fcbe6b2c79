"""What a product with packed weights is made of, as one value that is passed on."""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gated_matmul.reference import ACTIVATIONS

CODE_LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The largest magnitude of a code that a row of x is rounded to, by dtype."""

SCALES_A_BLOCK = 256
"""That share a scale of their own where scales are codes."""


class ScaleTable(NamedTuple):
    """What scales ``[N, G]`` stand for that are codes themselves: ``book[code] * blocks[index // 256] + offset``, index
    counting the scales in C order (double quantisation, arXiv:2305.14314).

    Attributes:
        book: float32[256].
        blocks: float32[ceil(N G / 256)].
        offset: float32[].
    """

    book: jax.Array
    blocks: jax.Array
    offset: jax.Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scale", "offset", "codebook", "order", "scale_table"],
    meta_fields=["bits"],
)
@dataclass(frozen=True)
class Weights:
    """Codes `[N, K]` (4 bits: `[N, K / 2]`), what they stand for, and the order of x's channels; as `quantized_matmul`
    takes them."""

    codes: jax.Array
    scale: jax.Array
    offset: jax.Array | None = None
    codebook: jax.Array | None = None
    order: jax.Array | None = None
    bits: int = 4
    scale_table: ScaleTable | None = None

    @property
    def group(self) -> int:
        """Channels that share a scale."""
        return int(self.codes.shape[1] * 8 // self.bits // self.scale.shape[1])


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["norm", "row_maxima"],
    meta_fields=["epsilon", "activation", "act_dtype", "gives_maxima"],
)
@dataclass(frozen=True)
class Surroundings:
    """What is done to x before a product and to its result, as `quantized_matmul` documents it."""

    norm: jax.Array | None = None
    row_maxima: jax.Array | None = None
    epsilon: float = 0.0
    activation: str | None = None
    act_dtype: str | None = None
    gives_maxima: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing."""
        fields = self.norm, self.row_maxima, self.activation, self.act_dtype
        return all(field is None for field in fields) and not self.gives_maxima


def normalised(x: jax.Array, around: Surroundings) -> jax.Array:
    """RMSNorm (arXiv:1910.07467) of x's rows where there is one."""
    if around.norm is None:
        return x
    wide = x.astype(jnp.float32)
    root = lax.rsqrt(sums_of_squares(x) / x.shape[1] + around.epsilon)
    return (wide * root[:, None]).astype(x.dtype) * around.norm


def sums_of_squares(x: jax.Array) -> jax.Array:
    """float32[M]."""
    wide = x.astype(jnp.float32)
    return jnp.sum(wide * wide, axis=1)


def row_maxima(x: jax.Array, channel_scale: jax.Array | None = None) -> jax.Array:
    """float32[M]: the largest ``|x * channel_scale|`` of each row; infinite where one is NaN."""
    wide = x.astype(jnp.float32)
    if channel_scale is not None:
        wide = wide * channel_scale.astype(jnp.float32)
    # XLA's vectorised maximum passes over NaN on the CPU, but not over infinity.
    return jnp.max(jnp.where(jnp.isfinite(wide), jnp.abs(wide), jnp.inf), axis=1)


def rounded_rows(x: jax.Array, act_dtype: str) -> tuple[jax.Array, jax.Array]:
    """Codes of rows `[M, K]`, rounded to nearest, ties to even, and float32 scales `[M]`: the largest magnitude over
    that of a code; 1 for a row of zeros, and infinite for one with NaN or infinity, whose products are not finite."""
    limit = CODE_LIMITS[act_dtype]
    scale = row_maxima(x) / limit
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
    exact = x.astype(jnp.float32) / scale[:, None]
    if act_dtype == "int8":
        return jnp.round(exact).astype(jnp.int8), scale
    return jnp.clip(exact, -limit, limit).astype(jnp.float8_e4m3fn), scale


def gated(out: jax.Array, around: Surroundings) -> jax.Array:
    """A GLU's gate (arXiv:2002.05202) where there is one: ``act(first half) * second half`` of the columns."""
    if around.activation is None:
        return out
    half = out.shape[1] // 2
    return ACTIVATIONS[around.activation](out[:, :half]) * out[:, half:]


def without_tables(x: jax.Array, weights: Weights) -> tuple[jax.Array, Weights]:
    """The same product with x's channels in the order of the weights, and with scales that are floats."""
    if weights.scale_table is not None:
        book, blocks, offset = weights.scale_table
        codes = weights.scale.reshape(-1).astype(jnp.int32)
        values = book[codes] * jnp.repeat(blocks, SCALES_A_BLOCK)[: codes.size] + offset
        weights = replace(weights, scale=values.reshape(weights.scale.shape), scale_table=None)
    return without_order(x, weights)


def without_order(x: jax.Array, weights: Weights) -> tuple[jax.Array, Weights]:
    """The same product with x's channels in the order of the weights."""
    if weights.order is None:
        return x, weights
    return jnp.take(x, weights.order, axis=1, mode="clip"), replace(weights, order=None)
