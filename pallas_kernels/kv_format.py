"""How keys and values are stored in a page pool: in a float type, or as codes with a scale per token and head.

Symmetric absmax quantisation of one token's row of one head at a time: ``value = code * scale``. The format follows
from the pool's dtype, so that nothing else need carry it.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class KVFormat:
    """A quantised format of a page pool.

    Attributes:
        name: "int8", "fp8_e4m3", "fp8_e5m2" or "int4".
        dtype: of the pool; uint8 holds two int4 codes a byte, channel 2j in the low nibble of byte j.
        limit: the largest magnitude of a code.
    """

    name: str
    dtype: Any
    limit: float

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte, which halves the last axis."""
        return self.dtype == jnp.uint8


INT8 = KVFormat("int8", jnp.dtype(jnp.int8), 127.0)
FP8_E4M3 = KVFormat("fp8_e4m3", jnp.dtype(jnp.float8_e4m3fn), 448.0)
FP8_E5M2 = KVFormat("fp8_e5m2", jnp.dtype(jnp.float8_e5m2), 57344.0)
INT4 = KVFormat("int4", jnp.dtype(jnp.uint8), 7.0)
FORMATS = (INT8, FP8_E4M3, FP8_E5M2, INT4)
FLOAT_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def format_of(dtype: Any) -> KVFormat | None:
    """The format of a pool of `dtype`, None for a float pool, which has no scales.

    Raises:
        ValueError: a dtype that no pool can have.
    """
    dtype = jnp.dtype(dtype)
    for candidate in FORMATS:
        if candidate.dtype == dtype:
            return candidate
    if dtype in FLOAT_DTYPES:
        return None
    allowed = [str(d) for d in (*FLOAT_DTYPES, *(f.dtype for f in FORMATS))]
    raise ValueError(f"pages dtype {dtype} is no page format; use one of {', '.join(allowed)} (uint8 for int4)")


def head_dim_of(pages: Any) -> int:
    """H of a pool ``[P, 2K, S, H]``, or ``[P, 2K, S, H / 2]`` where two codes share a byte."""
    kv_format = format_of(pages.dtype)
    return pages.shape[-1] * (2 if kv_format is not None and kv_format.packed else 1)


def mark_nonfinite(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Makes the key NaN and the value 0 wherever either of a row holds NaN or infinity.

    A NaN key is masked away for those who do not see the position and makes NaN of all who do; a NaN value would reach
    both, since 0 * NaN is NaN.

    Args:
        k, v: [..., H] in the dtype they are stored in, or that they are quantised from.
    """
    finite = jnp.all(jnp.isfinite(k) & jnp.isfinite(v), axis=-1, keepdims=True)
    return jnp.where(finite, k, jnp.nan), jnp.where(finite, v, 0)


def quantize(rows: jax.Array, kv_format: KVFormat) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of keys or values.

    The scale is ``max |row| / limit``, or 1 where that is 0 (or so small that it would be flushed to 0). Codes are
    rounded to nearest, ties to even; by the scale's making none exceeds the limit. A row with NaN or infinity has codes
    0 and the scale NaN.

    Args:
        rows: [..., H], any float dtype; H even for int4.
        kv_format: one of `FORMATS`.

    Returns:
        codes [..., H] in the format's dtype (int4: uint8[..., H / 2]), scales float32[...].

    Raises:
        ValueError: an odd H for int4.
    """
    rows = rows.astype(jnp.float32)
    # XLA's vectorised maximum passes over NaN on the CPU, but not over infinity.
    scales = jnp.max(jnp.where(jnp.isfinite(rows), jnp.abs(rows), jnp.inf), axis=-1) / kv_format.limit
    finite = jnp.isfinite(scales)
    scales = jnp.where(scales < jnp.finfo(jnp.float32).tiny, 1.0, jnp.where(finite, scales, jnp.nan))
    codes = jnp.where(finite[..., None], rows / scales[..., None], 0.0)
    if jnp.issubdtype(kv_format.dtype, jnp.floating):
        return codes.astype(kv_format.dtype), scales
    codes = jnp.round(codes).astype(jnp.int8)
    return (pack_nibbles(codes) if kv_format.packed else codes), scales


def dequantize(codes: jax.Array, scales: jax.Array | None) -> jax.Array:
    """float32 values of what a pool holds.

    Args:
        codes: [..., H] as stored (int4: uint8[..., H / 2]).
        scales: float32[...], None for a float pool.

    Returns:
        float32[..., H].
    """
    if codes.dtype == jnp.uint8:
        codes = unpack_nibbles(codes)
    values = codes.astype(jnp.float32)
    return values if scales is None else values * scales[..., None]


def pack_nibbles(codes: jax.Array) -> jax.Array:
    """uint8[..., H / 2] of int8[..., H] in -8 .. 7, the even channel in the low nibble, two's complement.

    Raises:
        ValueError: an odd H.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"head_dim={codes.shape[-1]} must be even for int4, whose bytes hold two channels")
    nibbles = jax.lax.bitcast_convert_type(codes, jnp.uint8) & 0xF
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_nibbles(packed: jax.Array) -> jax.Array:
    """int8[..., H] of uint8[..., H / 2]: the inverse of `pack_nibbles`."""
    signed = jax.lax.bitcast_convert_type(packed, jnp.int8)
    # Shifted to the top of the byte, then down with the sign; a concatenation of the two halves would be slow on a CPU.
    to_top = jnp.array([4, 0], jnp.int8)
    return ((signed[..., None] << to_top) >> 4).reshape(*packed.shape[:-1], -1)
