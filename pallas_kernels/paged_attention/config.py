"""Tile sizes and split policy of the Triton kernel, by device and shape."""

from dataclasses import dataclass
from typing import Any

from pallas_kernels.dispatch import Device
from pallas_kernels.paged_attention.split_plan import ListPolicy, SplitPolicy


@dataclass(frozen=True)
class TileConfig:
    """How one list of tiles is computed.

    Attributes:
        block_kv: positions of a tile.
        num_warps: of a program.
        num_stages: of the pipeline that loads tiles ahead.
        edges: whether tiles that need masks have loops of their own.
    """

    block_kv: int
    num_warps: int
    num_stages: int
    edges: bool


def tile_config(device: Device, *, block_m: int, head_dim: int, dtype: Any, pages_dtype: Any) -> TileConfig:
    """Sizes for tiles of `block_m` rows."""
    del device, dtype, pages_dtype
    return TileConfig(64 if head_dim <= 128 else 32, 4, 5 if block_m == 16 else 3, block_m > 16)


def split_policy(
    device: Device, *, num_tokens: int, num_rows: int, group: int, num_kv_heads: int, head_dim: int
) -> SplitPolicy:
    """How a step of T tokens in B rows is cut into tiles and pieces."""
    del group, head_dim
    sms = device.num_sms if device.platform == "gpu" else 4
    short = ListPolicy(16, max(4 * sms // num_kv_heads, 1), 256)
    if num_tokens <= num_rows:
        return SplitPolicy(short, None)
    return SplitPolicy(short, ListPolicy(64, max(2 * sms // num_kv_heads, 1), 512))
