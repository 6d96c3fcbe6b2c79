"""The KV write as one Pallas-Triton launch, with or without rotary embedding; page pool and scales in place.

A program handles one token and a few KV heads: the query rows that belong to them, the keys and the values. Rows are
held as tiles of ``[rows, channels]``, cut where the rotation pairs channels (the two halves, and what is not rotated),
so that no value has to move between lanes. Tiles have power-of-two sizes; what exceeds a row is masked and zero.

On a GPU a quotient may be off by its last two bits, and e5m2 codes go by way of float16 before Hopper: a value that
lies in the middle of two codes up to that may get either of them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.byte_pairs import as_pairs, from_pairs, needs_pairs
from pallas_kernels.dispatch import Device, current_device
from pallas_kernels.kv_format import KVFormat, format_of
from pallas_kernels.kv_write.config import tiles_for
from pallas_kernels.triton_call import triton_call


class Span(NamedTuple):
    """Channels ``start .. start + size - 1``, in ``lanes`` lanes."""

    start: int
    size: int

    @property
    def lanes(self) -> int:
        return pl.next_power_of_2(self.size)


class Part(NamedTuple):
    """A tile of some channels: float32 ``[heads, lanes]``, zero where a lane has no channel."""

    span: Span
    values: jax.Array


class Slot(NamedTuple):
    """Where a program writes."""

    page: jax.Array
    offset: jax.Array
    heads: jax.Array  # int32[heads]


def check_kv_write(pages: jax.Array, scales: jax.Array | None, spans: tuple[Span, ...], device: Device | None) -> None:
    """Raises NotImplementedError where the kernels cannot write such a pool (on `device`, None where interpreted).

    XLA's compiler does not refuse e4m3 on Ampere: it aborts the process.
    """
    kv_format = format_of(pages.dtype)
    if kv_format is not None and kv_format.packed and any(span.start % 2 or span.size % 2 for span in spans):
        raise NotImplementedError(f"int4 pages and an odd number of channels in {spans}")
    if pages.dtype == jnp.float8_e4m3fn and device is not None and (device.compute_capability or (0, 0)) < (8, 9):
        raise NotImplementedError(f"float8_e4m3fn pages on {device.kind}: compute capability 8.9 is needed")
    if needs_pairs(pages.shape, pages.dtype):
        channels = 4 if kv_format is not None and kv_format.packed else 2
        if any(span.start % channels or span.size % channels for span in spans):
            raise NotImplementedError(
                f"{pages.dtype}{pages.shape} has between 2 and 4 GiB of 8-bit elements, which are written {channels} "
                f"channels at a time, and {spans} do not divide by that; take fewer or more pages"
            )


def kv_write_triton(
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    scales: jax.Array | None = None,
    interpret: bool = False,
    paired: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Same contract as `kv_write`; `paired` writes any pool of bytes as those of 2 to 4 GiB have to be.

    Raises:
        NotImplementedError: a pool that the kernel cannot write.
    """
    tokens, heads, head_dim = k.shape
    check_kv_write(pages, scales, (Span(0, head_dim),), None if interpret else current_device())
    tiles = tiles_for(tokens, heads, 2, head_dim)
    kernel = partial(_kv_write_kernel, heads=tiles.heads, kv_format=format_of(pages.dtype))
    pool = _pool(pages, scales, paired)
    written = triton_call(
        kernel,
        name="kv_write",
        out_shape=tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in pool),
        grid=(tokens, heads // tiles.heads),
        num_warps=tiles.num_warps,
        input_output_aliases={4 + index: index for index in range(len(pool))},
        interpret=interpret,
    )(k, v, page_ids, offsets, *pool)
    new_pages, *new_scales = _written(written, pages.dtype)
    return (new_pages, new_scales[0]) if scales is not None else new_pages


def rope_kv_write_triton(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    scales: jax.Array | None = None,
    interpret: bool = False,
    paired: bool = False,
) -> tuple[jax.Array, ...]:
    """Same contract as `rope_kv_write`; `paired` writes any pool of bytes as those of 2 to 4 GiB have to be.

    Raises:
        NotImplementedError: a pool that the kernel cannot write.
    """
    tokens, heads, rows, head_dim = qkv.shape
    check_kv_write(pages, scales, rope_spans(head_dim, cos.shape[1]), None if interpret else current_device())
    tiles = tiles_for(tokens, heads, rows, head_dim)
    kernel = partial(_rope_kernel, heads=tiles.heads, kv_format=format_of(pages.dtype))
    pool = _pool(pages, scales, paired)
    q_shape = jax.ShapeDtypeStruct((tokens, heads * (rows - 2), head_dim), qkv.dtype)
    q, *written = triton_call(
        kernel,
        name="rope_kv_write",
        out_shape=(q_shape, *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in pool)),
        grid=(tokens, heads // tiles.heads),
        num_warps=tiles.num_warps,
        input_output_aliases={5 + index: 1 + index for index in range(len(pool))},
        interpret=interpret,
    )(qkv, cos, sin, page_ids, offsets, *pool)
    return q, *_written(written, pages.dtype)


def _pool(pages: jax.Array, scales: jax.Array | None, paired: bool) -> tuple[jax.Array, ...]:
    """The pool as the kernel addresses it."""
    pages = as_pairs(pages) if paired or needs_pairs(pages.shape, pages.dtype) else pages
    return (pages,) if scales is None else (pages, scales)


def _written(pool: Sequence[jax.Array], dtype: Any) -> tuple[jax.Array, ...]:
    """The pool as it came, whose pages are of `dtype`."""
    pages, *scales = pool
    return (pages if pages.dtype == dtype else from_pairs(pages, dtype)), *scales


def rope_spans(head_dim: int, half: int) -> tuple[Span, ...]:
    """The halves that are rotated, and the rest if there is one."""
    rest = head_dim - 2 * half
    return (Span(0, half), Span(half, half), *((Span(2 * half, rest),) if rest else ()))


def _kv_write_kernel(*refs: Any, heads: int, kv_format: KVFormat | None) -> None:
    k_ref, v_ref, page_ids_ref, offsets_ref = refs[:4]
    pages_ref, scales_ref = (refs[-1], None) if kv_format is None else refs[-2:]
    token = pl.program_id(0)
    own = pl.program_id(1) * heads + jnp.arange(heads)
    span = Span(0, k_ref.shape[-1])
    keys, values = (Part(span, _load(ref, (token, own[:, None]), span)) for ref in (k_ref, v_ref))
    slot = Slot(page_ids_ref[token], offsets_ref[token], own)
    _write([keys], [values], pages_ref, scales_ref, slot, kv_format)


def _rope_kernel(*refs: Any, heads: int, kv_format: KVFormat | None) -> None:
    qkv_ref, cos_ref, sin_ref, page_ids_ref, offsets_ref = refs[:5]
    q_ref, pages_ref, scales_ref = (*refs[-2:], None) if kv_format is None else refs[-3:]
    token, first = pl.program_id(0), pl.program_id(1) * heads
    groups, head_dim = qkv_ref.shape[2] - 2, qkv_ref.shape[3]
    spans = rope_spans(head_dim, cos_ref.shape[1])
    cos, sin = (_load(ref, (token,), spans[0]) for ref in (cos_ref, sin_ref))

    num_rows = heads * groups
    rows = jnp.arange(pl.next_power_of_2(num_rows))
    exists = (rows < num_rows)[:, None]
    source = (token, (first + rows // groups)[:, None], (rows % groups)[:, None])
    for part in _rotate([Part(span, _load(qkv_ref, source, span, exists)) for span in spans], cos, sin):
        _store(q_ref, (token, (first * groups + rows)[:, None]), part.span, part.values, exists)

    own = first + jnp.arange(heads)
    key = (token, own[:, None], groups)
    keys = _rotate([Part(span, _load(qkv_ref, key, span)) for span in spans], cos, sin)
    keys = [part._replace(values=_rounded(part.values, qkv_ref.dtype)) for part in keys]
    whole = Span(0, head_dim)
    values = Part(whole, _load(qkv_ref, (token, own[:, None], groups + 1), whole))
    slot = Slot(page_ids_ref[token], offsets_ref[token], own)
    _write(keys, [values], pages_ref, scales_ref, slot, kv_format)


def _rotate(parts: list[Part], cos: jax.Array, sin: jax.Array) -> list[Part]:
    first, second = parts[0].values, parts[1].values
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return [part._replace(values=values) for part, values in zip(parts, rotated, strict=False)] + parts[2:]


def _write(
    keys: list[Part], values: list[Part], pages_ref: Any, scales_ref: Any, slot: Slot, kv_format: KVFormat | None
) -> None:
    """Stores keys in rows 2h and values in rows 2h + 1; what is not finite as `mark_nonfinite` says."""
    if kv_format is None:
        keys, values = (
            [part._replace(values=_rounded(part.values, pages_ref.dtype)) for part in parts] for parts in (keys, values)
        )
    key_peaks, value_peaks = _peaks(keys), _peaks(values)
    finite = (key_peaks < jnp.inf) & (value_peaks < jnp.inf)
    for row, parts, peaks in ((2 * slot.heads, keys, key_peaks), (2 * slot.heads + 1, values, value_peaks)):
        bad = jnp.nan if parts is keys else 0.0
        if kv_format is not None:
            scales = jnp.where(finite, peaks / kv_format.limit, bad)
            scales = jnp.where(scales < jnp.finfo(jnp.float32).tiny, 1.0, scales)
            scales_ref[slot.page, row, slot.offset] = scales
        for part in parts:
            index = (slot.page, row[:, None], slot.offset)
            if kv_format is None:
                _store(pages_ref, index, part.span, jnp.where(finite[:, None], part.values, bad))
            else:
                codes = jnp.where(finite[:, None], part.values / scales[:, None], 0.0)
                _store_codes(pages_ref, index, part.span, codes, kv_format)


def _peaks(parts: list[Part]) -> jax.Array:
    """The largest magnitude of each row, float32[heads]; infinity where the row holds infinity or NaN."""
    peaks = []
    for part in parts:
        magnitudes = jnp.abs(part.values)
        peaks.append(jnp.max(jnp.where(magnitudes < jnp.inf, magnitudes, jnp.inf), axis=1))
    highest = peaks[0]
    for other in peaks[1:]:
        highest = jnp.maximum(highest, other)
    return highest


def _store_codes(ref: Any, index: tuple[Any, ...], span: Span, codes: jax.Array, kv_format: KVFormat) -> None:
    codes = jnp.minimum(jnp.maximum(codes, -kv_format.limit), kv_format.limit)
    if ref.dtype == jnp.int16:
        octets = _octets(codes, kv_format)
        low, high = jnp.unstack(octets.reshape(octets.shape[0], -1, 2), axis=-1)
        channels = 4 if kv_format.packed else 2
        _store(ref, index, Span(span.start // channels, span.size // channels), low | (high << 8))
    elif kv_format.packed:
        _store(ref, index, Span(span.start // 2, span.size // 2), _octets(codes, kv_format))
    else:
        _store(ref, index, span, codes if _is_float(kv_format) else _nearest(codes))


def _octets(codes: jax.Array, kv_format: KVFormat) -> jax.Array:
    """int32 of what is stored in each byte, 0 .. 255."""
    if _is_float(kv_format):
        return lax.bitcast_convert_type(codes.astype(kv_format.dtype), jnp.int8).astype(jnp.int32) & 255
    integers = _nearest(codes)
    if not kv_format.packed:
        return integers & 255
    low, high = jnp.unstack(integers.reshape(integers.shape[0], -1, 2), axis=-1)
    return (low & 15) | ((high & 15) << 4)


def _is_float(kv_format: KVFormat) -> bool:
    return bool(jnp.issubdtype(kv_format.dtype, jnp.floating))


def _nearest(values: jax.Array) -> jax.Array:
    """int32 nearest to `values`, ties to even: Triton has no such rounding, and XLA undoes tricks with 1.5 * 2^23."""
    below = jnp.floor(values)
    rest = values - below
    integers = below.astype(jnp.int32)
    return integers + ((rest > 0.5) | ((rest == 0.5) & (integers & 1 == 1))).astype(jnp.int32)


def _load(ref: Any, index: tuple[Any, ...], span: Span, exists: jax.Array | None = None) -> jax.Array:
    """Channels of the rows at `index` as float32, zero in lanes that have no channel and in rows that do not exist."""
    place, mask = _place(index, span, exists)
    other = None if mask is None else 0
    return plt.load(ref.at[place], mask=mask, other=other).astype(jnp.float32)


def _store(ref: Any, index: tuple[Any, ...], span: Span, values: jax.Array, exists: jax.Array | None = None) -> None:
    place, mask = _place(index, span, exists)
    plt.store(ref.at[place], values.astype(ref.dtype), mask=mask)


def _place(index: tuple[Any, ...], span: Span, exists: jax.Array | None) -> tuple[tuple[Any, ...], jax.Array | None]:
    """The index of each lane, and which lanes are to be touched; None for all."""
    lanes = jnp.arange(span.lanes)
    if any(jnp.ndim(axis) for axis in index):
        lanes = lanes[None, :]
    has_channel = None if span.size == span.lanes else lanes < span.size
    if has_channel is not None and exists is not None:
        has_channel = has_channel & exists
    return (*index, span.start + lanes), exists if has_channel is None else has_channel


def _rounded(values: jax.Array, dtype: Any) -> jax.Array:
    return values.astype(dtype).astype(jnp.float32)
