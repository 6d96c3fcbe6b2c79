"""Tile sizes by device and shape."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Device
from pallas_kernels.flash_attention import measured

MAX_HEAD_DIM = 256


class Tiles(NamedTuple):
    """How a kernel cuts its work; powers of two.

    Attributes:
        queries, keys: rows and columns of the logits that a program holds at a time.
        num_warps: of a program.
        num_stages: depth of the pipeline that loads what the inner loop walks over.
    """

    queries: int
    keys: int
    num_warps: int
    num_stages: int

    def fitted(self, num_queries: int, num_keys: int) -> "Tiles":
        """No larger than what there is to do, but never below the 16 rows of a matrix instruction."""
        queries, keys = min(self.queries, _covering(num_queries)), min(self.keys, _covering(num_keys))
        return self._replace(queries=queries, keys=keys)


class TileSet(NamedTuple):
    """Tiles of the three kernels."""

    forward: Tiles
    dq: Tiles
    dkv: Tiles


INTERPRETED = TileSet(Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1))
"""For the interpreter: small, so that small inputs have several tiles."""

# By lanes (the head dimension, up to a power of two from 64). Registers do not spill in the cases that tests/deviceless
# compiles; two stages at least, because with one Triton loads through registers and spills many.
FLOAT32 = {
    64: TileSet(Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 8, 2)),
    128: TileSet(Tiles(32, 32, 8, 2), Tiles(16, 32, 8, 2), Tiles(16, 16, 8, 2)),
    256: TileSet(Tiles(16, 16, 8, 2), Tiles(16, 16, 8, 2), Tiles(16, 16, 8, 2)),
}
"""Everywhere: each operand is split into two TF32 numbers, and registers run out early (at 256 lanes, backward, they
spill)."""

SM80 = {
    64: TileSet(Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(32, 128, 8, 2)),
    128: TileSet(Tiles(128, 64, 8, 3), Tiles(64, 64, 8, 2), Tiles(32, 64, 8, 3)),
    256: TileSet(Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2)),
}
SM86 = {
    64: TileSet(Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(32, 128, 8, 2)),
    128: TileSet(Tiles(128, 64, 8, 2), Tiles(64, 32, 4, 2), Tiles(32, 64, 8, 2)),
    256: TileSet(Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2)),
}
SM90 = {
    64: TileSet(Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 2), Tiles(64, 128, 8, 2)),
    128: TileSet(Tiles(128, 128, 8, 2), Tiles(128, 64, 8, 2), Tiles(32, 128, 8, 3)),
    256: TileSet(Tiles(128, 64, 8, 2), Tiles(64, 32, 8, 3), Tiles(16, 64, 8, 2)),
}


def tile_set(device: Device, dtype: np.dtype, head_dim: int) -> TileSet:
    """Tiles for operands of `dtype` on a device; the interpreter's where that is no NVIDIA GPU.

    Raises:
        NotImplementedError: heads wider than the kernels go.
    """
    if head_dim > MAX_HEAD_DIM:
        raise NotImplementedError(f"head_dim={head_dim}: the Triton kernels go up to {MAX_HEAD_DIM}; use 'xla'")
    if device.platform != "gpu" or device.compute_capability is None:
        return INTERPRETED
    lanes = max(64, _covering(head_dim))
    if dtype == jnp.float32:
        return FLOAT32[lanes]
    # Consumer GPUs have 99 KiB of shared memory a program, sm80 163, sm90 and sm100 227.
    table = {(8, 0): SM80, (9, 0): SM90, (10, 0): SM90}.get(device.compute_capability, SM86)
    key = (device.kind, lanes)
    tables = (measured.FORWARD, measured.DQ, measured.DKV)
    return TileSet(*(Tiles(*found.get(key, tiles)) for found, tiles in zip(tables, table[lanes], strict=True)))


def _covering(size: int) -> int:
    """The smallest power of two from 16 up that covers `size`."""
    return max(16, 1 << (size - 1).bit_length())
