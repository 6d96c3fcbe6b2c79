"""Tile sizes and split policy of the Triton kernel, by device and shape."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from pallas_kernels.dispatch import Device
from pallas_kernels.kv_format import format_of
from pallas_kernels.paged_attention import measured
from pallas_kernels.paged_attention.split_plan import PART, ListPolicy, SplitPolicy


@dataclass(frozen=True)
class TileConfig:
    """How one list of tiles is computed.

    Attributes:
        block_m: rows of a program, those of a tile or `PART` of them.
        block_kv: positions of a tile.
        num_warps: of a program.
        num_stages: of the pipeline that loads tiles ahead. Page ids come a stage before the pages, and their loads
            share the stages out: up to 4 there is one buffer of keys and values, from 5 there are two, from 7 three.
            Hopper's asynchronous products have one more.
        edges: whether tiles that need masks have loops of their own. Masks are nothing to a tile of 16 rows, and what
            the second loop takes to get going is.
    """

    block_m: int
    block_kv: int
    num_warps: int
    num_stages: int
    edges: bool


HOPPER = ((9, 0), (10, 0))
"""Compute capabilities of Hopper and its successor for data centres."""

AMPLE_SHARED_MEMORY = ((8, 0), *HOPPER)
"""Compute capabilities of data-centre GPUs, with 164 KB and more; the others have 100."""


def tile_config(
    device: Device, *, block_m: int, group: int, head_dim: int, dtype: Any, pages_dtype: Any, tree: bool = False
) -> TileConfig:
    """How tiles of `block_m` rows are computed.

    Args:
        device: what is compiled for.
        block_m: from the split plan.
        group: query heads of a KV head.
        head_dim: H.
        dtype: of the queries.
        pages_dtype: of the pool.
        tree: whether there is a tree mask, which takes registers.
    """
    fields = measured.TILES.get((device.kind, block_m, head_dim, str(jnp.dtype(pages_dtype))))
    config = TileConfig(*fields) if fields else _heuristic(device, block_m, group, head_dim, dtype, pages_dtype)
    if tree and block_m > 16:
        most = 16 if block_m >= 128 and (device.compute_capability or (9, 0)) < (9, 0) else 32
        return replace(config, block_kv=min(config.block_kv, most), num_warps=8)
    return config


def _heuristic(device: Device, block_m: int, group: int, head_dim: int, dtype: Any, pages_dtype: Any) -> TileConfig:
    capability = device.compute_capability or (9, 0)
    wide = head_dim > 128
    full = jnp.dtype(dtype).itemsize == 4
    block_kv = 32 if wide or full else 64
    if capability not in AMPLE_SHARED_MEMORY:
        block_kv //= 2
    if block_m <= 16:
        if wide and full:
            block_kv = 16
        kv_format = format_of(pages_dtype)
        spills = kv_format is not None and kv_format.packed and head_dim <= 64
        if kv_format is not None and not wide and not spills and capability in HOPPER:
            # Codes are bound by instructions, and what a tile costs besides its own halves.
            block_kv *= 2
        # Two buffers leave room for two or three programs on an SM, which hide one another's start.
        return TileConfig(block_m, block_kv, 4, 5, edges=False)
    if full:
        # Three products for one want registers: no more than a part of a tile.
        return TileConfig(min(block_m, PART), 16, 8, 3, edges=True)
    # Four warps spill with heads this wide.
    num_warps = 8 if block_m >= 128 or wide else 4
    if capability in HOPPER:
        return TileConfig(block_m, block_kv, num_warps, 3, edges=True)
    # With 64 positions the A100 has registers for 128 rows of these groups only.
    if format_of(pages_dtype) is not None or (block_m >= 128 and group not in (2, 4, 8)):
        block_kv = min(block_kv, 32)
    return TileConfig(block_m, block_kv, num_warps, 3 if wide else 5, edges=True)


def split_policy(
    device: Device, *, num_tokens: int, num_rows: int, group: int, num_kv_heads: int, head_dim: int
) -> SplitPolicy:
    """How a step of T tokens in B rows is cut into tiles and pieces.

    Four pieces an SM of short tiles, where nothing was measured, keep a step's last pieces from being much of it. Tiles
    with many rows have large partial results, and there are many of them where they are many; cutting them serves
    chunks of few tokens.
    """
    on_gpu = device.platform == "gpu"
    sms = device.num_sms if on_gpu else 4
    pieces, min_piece = measured.PIECES.get(device.kind, (4, 256))
    short = ListPolicy(16, max(pieces * sms // num_kv_heads, 1), min_piece)
    if num_tokens <= num_rows:
        return SplitPolicy(short, None)
    block_m = _long_block_m(device, sms, num_tokens, num_rows, group, num_kv_heads, head_dim)
    return SplitPolicy(short, ListPolicy(block_m, max(128 // block_m * sms // num_kv_heads, 1), 512))


def _long_block_m(
    device: Device, sms: int, num_tokens: int, num_rows: int, group: int, num_kv_heads: int, head_dim: int
) -> int:
    """Rows of a long tile.

    Twice the rows halve what is read of pages, but waste more on rows of few tokens, and make fewer tiles than the GPU
    can work at. Before Hopper Triton spreads the columns of a product wider than high over the warps, and the softmax
    then has to cross them, so that tiles should be as high as H.
    """
    if device.platform != "gpu" or head_dim > 128:
        return 64
    capability = device.compute_capability or (9, 0)
    if capability[0] == 8 and head_dim > 64:
        return 128
    enough = num_tokens * group // 128 * num_kv_heads >= 2 * sms
    return 128 if enough and num_tokens * group > 32 * num_rows else 64
