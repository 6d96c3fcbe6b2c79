"""Tile sizes and split policy of the kernel, by device and shape."""

from typing import NamedTuple

from pallas_kernels.dispatch import Device
from pallas_kernels.paged_attention.config import AMPLE_SHARED_MEMORY, HOPPER
from pallas_kernels.quantized_matmul import measured

MAX_BLOCK_K = 128
MIN_BLOCK_K = 32
"""Compiled for tiles of 16 channels of 4 bits the kernel's numbers are wrong, as its PTX shows: XLA's Triton joins what
the codes come to in another order."""

MAX_PARTIAL_BYTES = 16 << 20
"""Of the float32 sums of all pieces together."""

MIN_STEPS = 4
"""Tiles of channels that a piece has at least: fewer do not fill the pipeline."""

FEW_TOKENS = 32
"""Up to here scales meet the sums of a group, of which there are fewer than weights; beyond, the weights."""


class TileConfig(NamedTuple):
    """Attributes:
    out: weights' rows of a program.
    num_warps, num_stages: of a program, and of its pipeline of loads.
    programs: an SM, that channels are cut into pieces for.
    """

    out: int
    num_warps: int
    num_stages: int
    programs: int


WHOLE = TileConfig(32, 4, 6, 1)
"""Where channels must not be cut into pieces there are more programs of fewer rows, to fill the GPU all the same."""

WHOLE_DEEP = TileConfig(32, 4, 4, 1)
"""The same of long tiles of channels."""


class Tiles(NamedTuple):
    """Attributes:
    tokens, out, into: rows of x, rows of the weights and channels of a tile; powers of two.
    splits: pieces that the channels are cut into.
    steps: tiles of channels in a piece; the last may have fewer.
    num_warps, num_stages: as in `TileConfig`.
    """

    tokens: int
    out: int
    into: int
    splits: int
    steps: int
    num_warps: int
    num_stages: int


def block_k(group: int, tokens: int = 16) -> int:
    """Channels of a tile of so many rows: the largest power of two that divides the group, up to a limit."""
    return min(group & -group, MAX_BLOCK_K if tokens <= FEW_TOKENS else MAX_BLOCK_K // 2)


def block_tokens(num_tokens: int) -> int:
    """Rows of x in a tile."""
    return next((rows for rows in (16, 32, 64) if num_tokens <= rows), 128)


def tiles_for(
    device: Device, *, num_tokens: int, num_out: int, channels: int, bits: int, group: int, whole: bool = False
) -> Tiles:
    """How ``x[M, K] . w[N, K]^T`` is computed on a device; `whole`: the channels in one piece."""
    tokens = block_tokens(num_tokens)
    into = block_k(group, tokens)
    if whole:
        # Of more than 16 tokens, tiles of 128 channels would take all registers that there are.
        into = min(into, MAX_BLOCK_K if tokens == 16 else MAX_BLOCK_K // 2)
        config = WHOLE_DEEP if into == MAX_BLOCK_K else WHOLE
        return Tiles(tokens, config.out, into, 1, channels // into, config.num_warps, config.num_stages)
    fields = measured.TILES.get((device.kind, bits, tokens))
    config = TileConfig(*fields) if fields else _heuristic(device, tokens, into, bits)
    tiles = -(-num_tokens // tokens) * -(-num_out // config.out)
    steps = channels // into
    wanted = config.programs * (device.num_sms if device.platform == "gpu" else 1) // tiles
    most = min(steps // MIN_STEPS, MAX_PARTIAL_BYTES // (4 * num_tokens * num_out), 16)
    per_piece = -(-steps // max(min(wanted, most), 1))
    splits = -(-steps // per_piece)
    return Tiles(tokens, config.out, into, splits, per_piece, config.num_warps, config.num_stages)


def _heuristic(device: Device, tokens: int, into: int, bits: int) -> TileConfig:
    """Few tokens are bound by the bytes of the weights: several programs share an SM, each with some tiles in flight.

    By Little's law 11 KiB an SM (A100) to 26 KiB (H200) keep the memory busy. Of many tokens two programs share an SM,
    so that one decodes while the other multiplies.
    """
    if tokens <= FEW_TOKENS:
        return TileConfig(128, 4, 4 if into == MAX_BLOCK_K else 6, 4)
    stage = into * (2 * tokens + 128 * bits // 8)
    shared = 160 << 10 if device.compute_capability in AMPLE_SHARED_MEMORY else 96 << 10
    num_stages = 4 if 2 * 4 * stage <= shared else 3
    return TileConfig(128, 4 if tokens == 64 and device.compute_capability in HOPPER else 8, num_stages, 2)
